-- name: open_run
insert into runs (id, epoch, config, created_at, owner, owned_until)
values (:run, 1, :config, :now, :owner, :until)
on conflict (id) do update
set epoch = runs.epoch + 1, config = excluded.config,
    owner = excluded.owner, owned_until = excluded.owned_until
where excluded.owner = '' or runs.owner in ('', excluded.owner, :gone)
   or runs.owned_until <= :now or runs.owned_until > :limit
returning *;

-- name: hold_run
update runs set owned_until = :until where id = :run and owner = :owner returning id;

-- name: forget_policies
delete from policies where run_id = ?;

-- name: release_groups
update groups set state = 'settled', claimed_epoch = null
where run_id = ? and purpose = 'train' and state = 'claimed';

-- name: run
select * from runs where id = ?;

-- name: lock_run
select * from runs where id = ?;

-- name: runs
select id from runs order by created_at, id;

-- name: claimed_groups
select id from groups
where run_id = :run and purpose = 'train' and state = 'claimed'
order by id limit :n;

-- name: last_of_first_groups
select max(id) as id from (
    select id from groups
    where run_id = :run and purpose = 'train' and state in ('open', 'settled', 'claimed')
    order by id limit :n
) as untrained;

-- name: settled_groups
select id from groups
where run_id = :run and purpose = 'train' and state = 'settled' and id <= coalesce(:until, id)
order by id limit :n;

-- name: claimed_of
select id from groups
where run_id = :run and purpose = 'train' and state = 'claimed'
    and id in (select value from json_each(:groups))
order by id limit :n;

-- name: settled_of
select id from groups
where run_id = :run and purpose = 'train' and state = 'settled'
    and id in (select value from json_each(:groups))
order by id limit :n;

-- name: claim_group
update groups set state = 'claimed', claimed_epoch = :epoch where id = :group;

-- name: group
select run_id, purpose, state, claimed_epoch, trained_step from groups where id = ?;

-- name: take_group
update groups set state = :state, trained_step = :step where id = :group;

-- name: calls
select t.id, t.seq, r.id as rollout_id
from rollouts r join transitions t on t.attempt_id = r.attempt_id
where r.run_id = :run and r.group_id in (select value from json_each(:groups)) and t.late = 0;

-- name: members
select
    r.id, r.attempt_id,
    (
        select coalesce(max(w.position) + 1, 0) from rewards w
        where w.attempt_id = r.attempt_id and w.late = 0
    ) as rewards
from rollouts r
where r.run_id = :run and r.group_id in (select value from json_each(:groups))
  and r.attempt_id is not null;

-- name: add_reward
insert into rewards (attempt_id, late, position, scope, target, name, value, source, step, note)
values (:attempt, :late, :position, :scope, :target, :name, :value, :source, :step, :note);

-- name: add_credit
insert into credits (transition, policy, step, advantage, baseline, gate, weight, psi)
values (:transition, :policy, :step, :advantage, :baseline, :gate, :weight, :psi);

-- name: step
select committed, record from steps where run_id = ? and step = ?;

-- name: commit_step
insert into steps (run_id, step, committed, at, record) values (:run, :step, 1, :now, :record)
on conflict (run_id, step) do update
set committed = 1, at = excluded.at, record = excluded.record;

-- name: advance_run
update runs set step = step + 1, checkpoint = coalesce(:checkpoint, checkpoint) where id = :run;

-- name: log_step
insert into steps (run_id, step, committed, at) values (:run, :step, 0, :now)
on conflict (run_id, step) do update set at = excluded.at where steps.committed = 0;

-- name: set_metric
insert into metrics (run_id, step, name, value) values (?, ?, ?, ?)
on conflict (run_id, step, name) do update set value = excluded.value;

-- name: metrics
select step, name, value from metrics
where run_id = :run and step > :after and step <= :last order by step, name;

-- name: steps
select step, committed, at from steps where run_id = :run and step > :after
order by step limit :limit;

-- name: publish
insert into policies (run_id, policy, version, base_url, model)
values (:run, :policy, :version, :base_url, :model)
on conflict (run_id, policy) do update
set version = excluded.version, base_url = excluded.base_url, model = excluded.model;

-- name: policies
select * from policies where run_id = ?;
