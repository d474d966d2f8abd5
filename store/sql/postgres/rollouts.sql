-- name: group
select run_id, purpose, state, pending from groups where id = ? for no key update;

-- name: queued
select * from rollouts where state = 'queued'
order by priority desc, seq limit :n
for update skip locked;

-- name: queued_of_run
select * from rollouts
where state = 'queued' and run_id = :run
order by priority desc, seq limit :n
for update skip locked;

-- name: lock_claim
select pg_advisory_xact_lock(hashtextextended(:claim_id, 0));

-- name: heartbeat
-- Looks up by id only: the planner's estimate of running attempts dates from the last analyze, and
-- it would scan all their leases, with every row version.
with named as materialized (
    select id, state, lease_until from attempts
    where id = any (array(select json_array_elements_text(:attempts::json)))
    order by id
    for no key update
)
update attempts set
    lease = case when attempts.lease_until < :until then :lease else lease end,
    lease_until = greatest(attempts.lease_until, :until),
    together = null
from named
where attempts.id = named.id and named.state = 'running' and named.lease_until > :now
returning attempts.id;

-- name: resume
-- Skipped rows are locked by a transaction that extends or ends them.
update attempts set lease_until = :until, lease = greatest(lease, :grace)
from (
    select id as silent from attempts
    where state = 'running' and lease_until < :until
    for no key update skip locked
) as unheard
where id = silent;

-- name: shorten
update attempts set lease_until = :now + lease
from (
    select id as long from attempts
    where state = 'running' and lease_until > :now + lease + :slack
    for no key update skip locked
) as far
where id = long;

-- name: lock_expiry
-- A count of a lost runner's rollouts sees all of them, or the result of another count.
select pg_advisory_xact_lock(hashtextextended('agentrl leases', 0));

-- name: expired
select
    a.id as attempt, a.runner, a.together as known, a.started_at,
    r.id, r.run_id, r.group_id, r.attempts, r.max_attempts, r.together,
    r.ran is not null as scoring
from attempts a join rollouts r on r.id = a.rollout_id
where a.state = 'running' and a.lease_until <= ?
order by r.seq
for update of r, a skip locked;

-- name: suspect
-- Skipped rows are locked by a transaction that extends or ends them.
update attempts set together = greatest(coalesce(together, 0), :together)
from (
    select id as held from attempts
    where state = 'running' and runner = :runner
    for no key update skip locked
) as others
where id = held;

-- name: attempt
select
    a.id as attempt, a.fence, a.state, a.lease_until, a.started_at, a.outcome,
    r.id, r.run_id, r.group_id, r.attempts, r.max_attempts, r.together
from attempts a join rollouts r on r.id = a.rollout_id
where a.id = ?
for no key update of r, a;

-- name: cancellable
-- Not a join: if the rollout was claimed during the wait for its lock, the join would not see its
-- new attempt.
select
    r.id, r.run_id, r.group_id, r.state, r.together, r.attempt_id as attempt,
    (select a.started_at from attempts a where a.id = r.attempt_id) as started_at
from rollouts r
where r.id = ? and r.state in ('queued', 'running')
for no key update of r;
