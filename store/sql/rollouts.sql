-- name: open_group
insert into groups (id, run_id, purpose, step, state, pending)
values (:group, :run, :purpose, :step, 'open', 0)
on conflict (id) do nothing;

-- name: group
select run_id, purpose, state, pending from groups where id = ?;

-- name: grow_group
update groups set pending = pending + :new, state = 'open' where id = :group;

-- name: enqueue
insert into rollouts (
    id, run_id, group_id, position, purpose, step, state, priority, max_attempts, timeout,
    sampling, task, branch_of, branch_calls, branch_without, seats, candidate
) values (
    :id, :run, :group, :index, :purpose, :step, 'queued', :priority, :max_attempts, :timeout,
    :sampling, :task, :branch_of, :branch_calls, :branch_without, :seats,
    :candidate
)
on conflict (id) do nothing;

-- name: group_of
select group_id from rollouts where id = ?;

-- name: queued
select * from rollouts where state = 'queued' order by priority desc, seq limit :n;

-- name: queued_of_run
select * from rollouts
where state = 'queued' and run_id = :run
order by priority desc, seq limit :n;

-- name: start_rollout
update rollouts set state = 'running', attempts = :fence, attempt_id = :attempt where seq = :seq;

-- name: start_attempt
insert into attempts (
    id, rollout_id, run_id, fence, state, runner, claim_id, lease, lease_until, started_at
) values (
    :attempt, :rollout, :run, :fence, 'running', :runner, :claim_id, :lease, :lease_until, :now
);

-- name: keep_run
update rollouts set ran = :ran where id = :id;

-- name: take_transitions
-- Move the rows of the attempt that ran the agent to the attempt that scores it.
update transitions set attempt_id = :attempt where attempt_id = :before and late = 0;

-- name: take_spans
update spans set attempt_id = :attempt where attempt_id = :before and late = 0;

-- name: take_rewards
update rewards set attempt_id = :attempt where attempt_id = :before and late = 0;

-- name: lock_claim
select null;  -- not needed: there is only one writer

-- name: claimed
select r.*, a.id as claimed_id, a.fence, a.state as claimed_state, a.lease_until
from attempts a join rollouts r on r.id = a.rollout_id
where a.claim_id = ?
order by a.rowid;

-- name: claims
select id, run_id, claim_id from attempts where id in (select value from json_each(?));

-- name: owner
select run_id from rollouts where id = :rollout
union all
select run_id from groups where id = :group;

-- name: held
select count(*) as held, min(r.together) as most
from attempts a join rollouts r on r.id = a.rollout_id
where a.state = 'running' and a.runner = ?;

-- name: heartbeat
update attempts set
    lease = case when lease_until < :until then :lease else lease end,
    lease_until = max(lease_until, :until),
    together = null
where id in (select value from json_each(:attempts)) and state = 'running' and lease_until > :now
returning id;

-- name: resume
update attempts set lease_until = :until, lease = max(lease, :grace)
where state = 'running' and lease_until < :until;

-- name: leases
select
    -- Not min(): PostgreSQL may read every lease for it, if it underestimates their number.
    (
        select lease_until from attempts where state = 'running' order by lease_until limit 1
    ) as ends,
    (
        select lease_until - lease from attempts where state = 'running'
        order by lease_until desc limit 1
    ) as heard,
    exists (
        select 1 from rollouts where together is not null and state in ('queued', 'running')
    ) as suspects;

-- name: shorten
update attempts set lease_until = :now + lease
where state = 'running' and lease_until > :now + lease + :slack;

-- name: lock_expiry
select null;  -- not needed: there is only one writer

-- name: expired
select
    a.id as attempt, a.runner, a.together as known, a.started_at,
    r.id, r.run_id, r.group_id, r.attempts, r.max_attempts, r.together,
    r.ran is not null as scoring
from attempts a join rollouts r on r.id = a.rollout_id
where a.state = 'running' and a.lease_until <= ?
order by r.seq;

-- name: suspect
update attempts set together = max(coalesce(together, 0), :together)
where state = 'running' and runner = :runner;

-- name: attempt
select
    a.id as attempt, a.fence, a.state, a.lease_until, a.started_at, a.outcome,
    r.id, r.run_id, r.group_id, r.attempts, r.max_attempts, r.together
from attempts a join rollouts r on r.id = a.rollout_id
where a.id = ?;

-- name: end_attempt
update attempts
set state = :state, ended_at = :now, outcome = :outcome,
    error_kind = :kind, error_message = :message, error_traceback = :traceback
where id = :attempt;

-- name: requeue
update rollouts set state = 'queued', together = :together where id = :id;

-- name: requeue_free
update rollouts set state = 'queued', max_attempts = max_attempts + 1, together = :together
where id = :id;

-- name: end_rollout
update rollouts
set state = :state, result = :result, seconds = :seconds, ran = null,
    error_kind = :kind, error_message = :message, error_traceback = :traceback
where id = :id;

-- name: cancellable
select r.id, r.run_id, r.group_id, r.state, r.together, a.id as attempt, a.started_at
from rollouts r left join attempts a on a.id = r.attempt_id
where r.id = ? and r.state in ('queued', 'running');

-- name: pending
select pending from groups where id = ?;

-- name: failures
with kinds as (
    select error_kind as kind, count(*) as attempts, max(ended_at) as last
    from attempts f
    where f.run_id = :run and f.error_kind is not null and f.error_kind <> 'cancelled'
      and (
        f.error_kind <> 'lost_runner' or exists (
            select 1 from rollouts r
            where r.id = f.rollout_id and r.attempt_id = f.id and r.state = 'failed'
        )
      )
    group by error_kind
)
select kinds.kind, kinds.attempts, a.rollout_id, a.error_message
from kinds
join attempts a on a.run_id = :run and a.error_kind = kinds.kind and a.ended_at = kinds.last
order by kinds.kind, a.rollout_id;
