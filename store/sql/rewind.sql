-- name: taken
select
    g.id, g.state,
    exists (select 1 from rollouts r where r.run_id = g.run_id and r.group_id = g.id) as kept
from groups g
where g.run_id = :run and g.purpose = 'train' and g.state in ('trained', 'discarded')
  and g.trained_step >= :step
order by g.id;

-- name: delete_credits
delete from credits where transition in (
    select t.seq
    from groups g
    join rollouts r on r.run_id = g.run_id and r.group_id = g.id
    join attempts a on a.rollout_id = r.id
    join transitions t on t.attempt_id = a.id
    where g.run_id = :run and g.purpose = 'train' and g.trained_step >= :step
);

-- name: delete_given
delete from rewards where step is not null and attempt_id in (
    select a.id
    from groups g
    join rollouts r on r.run_id = g.run_id and r.group_id = g.id
    join attempts a on a.rollout_id = r.id
    where g.run_id = :run and g.purpose = 'train' and g.trained_step >= :step
);

-- name: settle_group
update groups set state = 'settled', trained_step = null, claimed_epoch = null where id = ?;

-- name: delete_group
delete from groups where id = ?;

-- name: evaluations
select r.id, r.state
from rollouts r join groups g on g.id = r.group_id
where r.run_id = :run and g.purpose = 'eval' and g.step > :step
order by r.id;

-- name: delete_metric
delete from metrics where run_id = ? and step = ? and name = ?;

-- name: delete_metrics
delete from metrics where run_id = :run and step > :step;

-- name: delete_steps
delete from steps where run_id = :run and step > :step;

-- name: reopen_step
update steps set committed = 0, record = null where run_id = :run and step = :step;

-- name: rewind_run
update runs set step = :step, checkpoint = :checkpoint where id = :run;
