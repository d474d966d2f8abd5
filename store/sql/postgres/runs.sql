-- name: lock_run
select * from runs where id = ? for no key update;

-- name: settled_groups
-- A group that is locked is growing, so it is not settled any more.
select id from groups
where run_id = :run and purpose = 'train' and state = 'settled' and id <= coalesce(:until, id)
order by id limit :n
for no key update skip locked;

-- name: calls
select t.id, t.seq, r.id as rollout_id
from rollouts r join transitions t on t.attempt_id = r.attempt_id
where r.run_id = :run
  and r.group_id = any (array(select json_array_elements_text(:groups::json)))
  and t.late = 0;

-- name: members
select
    r.id, r.attempt_id,
    (
        select coalesce(max(w.position) + 1, 0) from rewards w
        where w.attempt_id = r.attempt_id and w.late = 0
    ) as rewards
from rollouts r
where r.run_id = :run and r.group_id = any (array(select json_array_elements_text(:groups::json)))
  and r.attempt_id is not null;
