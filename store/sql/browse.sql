-- Pages: select the keys of a page's rows first, then their columns.

-- name: metric_names
with recursive names (name) as (
    select min(name) from metrics where run_id = :run
    union all
    select (select min(m.name) from metrics m where m.run_id = :run and m.name > names.name)
    from names where names.name is not null
)
select name from names where name is not null;

-- name: last_step
select max(step) as step from steps where run_id = ?;

-- The first point of each bucket of `stride` steps, and the last point: one index look-up per
-- bucket, however many steps and metrics the run has.
-- name: series
with recursive buckets (low) as (
    select :first
    union all
    select low + :stride from buckets where low + :stride <= :last
)
select m.step, m.value
from buckets cross join metrics m
where m.run_id = :run and m.name = :name and m.step = (
    select min(n.step) from metrics n
    where n.run_id = :run and n.name = :name and n.step >= low and n.step < low + :stride
)
union
select newest.step, newest.value from (
    select step, value from metrics
    where run_id = :run and name = :name and step >= :first
    order by step desc limit 1
) as newest
order by step;

-- name: groups
with page as materialized (
    select id, run_id, purpose, step, state, trained_step from groups where run_id = :run

-- name: group_purpose
and purpose = :purpose

-- For the groups of one step; the plus keeps SQLite from reading all groups of the purpose.
-- name: group_of_purpose
and +purpose = :of_purpose

-- name: group_step
and step = :step

-- name: group_trained
and trained_step = :trained

-- name: group_state
and state = :state

-- name: group_before
and id < :before

-- name: group_members
    order by id desc limit :limit
)
select
    p.id, p.purpose, p.step, p.state, p.trained_step, r.id as rollout, r.state as rollout_state,
    (
        select w.value from rewards w
        where w.attempt_id = r.attempt_id and w.late = 0 and w.scope = 'rollout'
          and w.name = 'outcome'
        order by w.position limit 1
    ) as outcome
from page p left join rollouts r on r.run_id = p.run_id and r.group_id = p.id
order by p.id desc, r.position, r.seq;

-- A search examines chunks of rollouts, newest first.
-- name: chunk
with chunk as materialized (
    select step, seq, row_number() over (order by step desc, seq desc) as number
    from rollouts
    where run_id = :run and (step, seq) < (:step, :seq)

-- name: chunk_from
and step >= :first

-- name: chunk_state
and state <> 'succeeded' and state = :state

-- name: chunk_size
    order by step desc, seq desc limit :size
)

-- name: chunk_end
select step, seq, number from chunk order by number desc limit 1;

-- name: search
select
    r.seq, r.id, r.run_id, r.group_id, r.position, r.purpose, r.step, r.state, r.attempts,
    r.attempt_id, r.seconds, r.error_kind,
    case when g.state = 'trained' then g.trained_step end as trained_step
from chunk c
cross join rollouts r
cross join groups g
where r.seq = c.seq and g.id = r.group_id

-- name: with_purpose
and r.purpose = :purpose

-- name: with_state
and r.state = :state

-- name: with_error
and r.error_kind = :error

-- name: with_reward
and exists (
    select 1 from rewards w
    where w.attempt_id = r.attempt_id and w.late = 0 and w.name = :name_0
      and w.value >= :low_0 and w.value <= :high_0
)

-- name: with_call
and exists (
    select 1 from transitions t where t.attempt_id = r.attempt_id and t.late = 0

-- name: call_role
and t.role = :role

-- name: call_policy
and t.policy = :policy

-- name: call_version
and t.version = :version

-- name: call_images
and t.images is not null

-- name: call_end
)

-- name: with_text
and (
    instr(r.error_message, :words) > 0
    or exists (
        select 1 from transitions t
        where t.attempt_id = r.attempt_id and t.late = 0
          and (instr(t.answer, :text) > 0 or instr(t.messages, :text) > 0)
    )
)

-- name: newest_first
order by c.number limit :limit;

-- name: attempts
select * from attempts where rollout_id = ? order by fence;
