-- name: rows_runs
select count(*) as n from runs;

-- name: rows_groups
select count(*) as n from groups;

-- name: rows_rollouts
select count(*) as n from rollouts;

-- name: rows_attempts
select count(*) as n from attempts;

-- name: rows_transitions
select count(*) as n from transitions;

-- name: rows_payloads
select count(*) as n from payloads;

-- name: rows_images
select count(*) as n from images;

-- name: rows_spans
select count(*) as n from spans;

-- name: rows_rewards
select count(*) as n from rewards;

-- name: rows_credits
select count(*) as n from credits;

-- name: rows_steps
select count(*) as n from steps;

-- name: rows_metrics
select count(*) as n from metrics;

-- name: rows_documents
select count(*) as n from documents;

-- name: rows_policies
select count(*) as n from policies;

-- name: rows_events
select count(*) as n from events;

-- name: rows_requests
select count(*) as n from requests;

-- name: rows_datasets
select count(*) as n from datasets;

-- name: rows_items
select count(*) as n from items;

-- name: rows_sides
select count(*) as n from sides;

-- name: rows_judgements
select count(*) as n from judgements;

-- name: rows_logprobs
select count(*) as n from logprobs;

-- name: size
select pages.page_count * size.page_size as bytes, free.freelist_count * size.page_size as free
from pragma_page_count as pages, pragma_page_size as size, pragma_freelist_count as free;

-- In order of arrival, page by page: reads the table only once.
-- name: prunable
select
    r.seq, r.id,
    (
        select count(*) from attempts a join transitions t on t.attempt_id = a.id
        where a.rollout_id = r.id
    ) + (
        select count(*) from attempts a join spans s on s.attempt_id = a.id
        where a.rollout_id = r.id
    ) as weight
from rollouts r join groups g on g.id = r.group_id join runs u on u.id = r.run_id
where r.seq > :after
  and r.run_id = coalesce(:run, r.run_id)
  and g.step < u.step - :keep
  and (
    (
        g.purpose = 'train' and g.state in ('trained', 'discarded')
        and g.trained_step < u.step - :keep
    )
    or (g.purpose = 'eval' and g.state = 'settled')
  )
  and (:aged = 0 or coalesce((
    select max(a.ended_at) from rollouts m join attempts a on a.rollout_id = m.id
    where m.run_id = g.run_id and m.group_id = g.id
  ), 0) <= :before)
  and not exists (select 1 from sides s where s.rollout_id = r.id and s.own is null)
order by r.seq limit :n;

-- name: newest_rollout
select coalesce(max(seq), 0) as seq from rollouts;

-- name: groups_of
select r.id, r.run_id, r.group_id, g.purpose, g.state
from rollouts r join groups g on g.id = r.group_id
where r.id in (select value from json_each(:rollouts));

-- Number of rows of the rollouts in a JSON list of ids; bytes of the large columns.
-- name: evidence
select
    (
        select count(*) from attempts
        where rollout_id in (select value from json_each(:rollouts))
    ) as attempts,
    (
        select count(*) from attempts a join rewards w on w.attempt_id = a.id
        where a.rollout_id in (select value from json_each(:rollouts))
    ) as rewards,
    t.n as transitions, s.n as spans, t.bytes + s.bytes as bytes
from (
    select
        count(*) as n,
        coalesce(sum(
            length(prompt) + length(completion) + length(logprobs)
            + length(cast(messages as blob)) + coalesce(length(cast(answer as blob)), 0)
            + coalesce((
                select sum(
                    length(d.advantage) + length(d.baseline) + length(d.gate)
                    + length(d.weight) + length(d.psi)
                ) from credits d where d.transition = c.seq
            ), 0)
        ), 0) as bytes
    from attempts a join transitions c on c.attempt_id = a.id
    where a.rollout_id in (select value from json_each(:rollouts))
) t, (
    select
        count(*) as n,
        coalesce(sum(length(cast(name as blob)) + length(cast(attributes as blob))), 0) as bytes
    from attempts a join spans c on c.attempt_id = a.id
    where a.rollout_id in (select value from json_each(:rollouts))
) s;

-- name: tools
select distinct c.tools as hash
from transitions c join attempts a on a.id = c.attempt_id
where a.rollout_id in (select value from json_each(:rollouts)) and c.tools is not null;

-- Prevents references to payloads and additions to groups that are being deleted. Not needed here:
-- there is only one writer.
-- name: lock_payloads
select 1;

-- KiB of pages that the connection keeps from now on: those of a transaction of a prune, of which
-- ids are random, fit.
-- name: large_cache
pragma cache_size = -16384;

-- name: lock_groups
select 1 where :rollouts is not null;

-- name: delete_credits
delete from credits where transition in (
    select c.seq from transitions c join attempts a on a.id = c.attempt_id
    where a.rollout_id in (select value from json_each(:rollouts))
);

-- name: delete_transitions
delete from transitions where attempt_id in (
    select id from attempts where rollout_id in (select value from json_each(:rollouts))
);

-- name: delete_spans
delete from spans where attempt_id in (
    select id from attempts where rollout_id in (select value from json_each(:rollouts))
);

-- name: delete_rewards
delete from rewards where attempt_id in (
    select id from attempts where rollout_id in (select value from json_each(:rollouts))
);

-- name: delete_rollout_images
delete from rollout_images where rollout_id in (select value from json_each(:rollouts));

-- name: delete_attempts
delete from attempts where rollout_id in (select value from json_each(:rollouts));

-- name: delete_rollouts
delete from rollouts where id in (select value from json_each(:rollouts));

-- name: delete_payload
delete from payloads
where hash = :hash and not exists (select 1 from transitions where tools = :hash);

-- name: delete_group
delete from groups
where id = :group and not exists (
    select 1 from rollouts where run_id = :run and group_id = :group
);

-- name: runs
select id from runs where id = coalesce(:run, id) order by id;

-- Events have no time, so steps provide it: events before the first event of the newest removable
-- step may be removed.
-- name: old_events
select min(seq) as upto from events
where run_id = :run and kind = 'step' and id = (
    select cast(max(s.step) as text) from steps s join runs u on u.id = s.run_id
    where s.run_id = :run and s.committed = 1 and s.step < u.step - :keep and s.at <= :before
);

-- name: count_events
select count(*) as n, min(seq) as first from events where run_id = :run and seq < :upto;

-- name: delete_events
delete from events where run_id = :run and seq >= :first and seq < :upto;
