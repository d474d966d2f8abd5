-- Rollouts of a JSON list of ids, and those that replay a part of them.
-- name: family
with recursive family (id) as (
    select id from rollouts where id in (select value from json_each(:rollouts))
    union
    select r.id from rollouts r join family f on r.branch_of = f.id
)
select r.id, r.run_id, r.group_id, r.state, g.state as group_state
from rollouts r join groups g on g.id = r.group_id
where r.id in (select id from family)
order by r.id;

-- name: sides
select digest from sides where rollout_id in (select value from json_each(:rollouts));

-- name: touched
select dataset, version, count(*) as n from items
where chosen in (select value from json_each(:sides))
   or rejected in (select value from json_each(:sides))
group by dataset, version order by dataset, version;

-- name: delete_items
delete from items
where chosen in (select value from json_each(:sides))
   or rejected in (select value from json_each(:sides));

-- name: delete_logprobs
delete from logprobs where side in (select value from json_each(:sides))
  and not exists (select 1 from sides s where s.digest = side);

-- name: delete_judgements
delete from judgements where subject in (select value from json_each(:rollouts));

-- Trained groups stay: their steps name them.
-- name: empty_groups
select id, run_id, purpose, state from groups
where id in (select value from json_each(:groups)) and state in ('open', 'settled')
  and not exists (select 1 from rollouts r where r.run_id = groups.run_id and r.group_id = groups.id);

-- name: delete_group
delete from groups where id = ?;
