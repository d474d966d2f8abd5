-- PostgreSQL reuses the space of removed rows by itself; only a vacuum knows its size.
-- name: size
select pg_database_size(current_database()) as bytes, 0 as free;

-- name: lock_payloads
lock table payloads in share row exclusive mode;

-- name: lock_groups
select id from groups
where id in (
    select group_id from rollouts
    where id = any (array(select json_array_elements_text(:rollouts::json)))
)
order by id for no key update;

-- name: evidence
select
    r.id, r.run_id, r.group_id, g.purpose, g.state,
    (select count(*) from attempts a where a.rollout_id = r.id) as attempts,
    coalesce(t.n, 0) as transitions,
    coalesce(s.n, 0) as spans,
    (
        select count(*) from rewards w join attempts a on a.id = w.attempt_id
        where a.rollout_id = r.id
    ) as rewards,
    coalesce(t.bytes, 0) + coalesce(s.bytes, 0) + coalesce(k.bytes, 0) as bytes
from rollouts r
join groups g on g.id = r.group_id
left join (
    select
        a.rollout_id, count(*) as n,
        sum(
            octet_length(prompt) + octet_length(completion) + octet_length(logprobs)
            + octet_length(messages) + coalesce(octet_length(answer), 0)
        ) as bytes
    from transitions c join attempts a on a.id = c.attempt_id
    where a.rollout_id = any (array(select json_array_elements_text(:rollouts::json)))
    group by a.rollout_id
) t on t.rollout_id = r.id
left join (
    select
        a.rollout_id, count(*) as n,
        sum(octet_length(name) + octet_length(attributes)) as bytes
    from spans c join attempts a on a.id = c.attempt_id
    where a.rollout_id = any (array(select json_array_elements_text(:rollouts::json)))
    group by a.rollout_id
) s on s.rollout_id = r.id
left join (
    select
        a.rollout_id,
        sum(
            octet_length(d.advantage) + octet_length(d.baseline) + octet_length(d.gate)
            + octet_length(d.weight) + octet_length(d.psi)
        ) as bytes
    from credits d
    join transitions c on c.seq = d.transition
    join attempts a on a.id = c.attempt_id
    where a.rollout_id = any (array(select json_array_elements_text(:rollouts::json)))
    group by a.rollout_id
) k on k.rollout_id = r.id
where r.id = any (array(select json_array_elements_text(:rollouts::json)));

-- name: tools
select distinct c.tools as hash
from transitions c join attempts a on a.id = c.attempt_id
where a.rollout_id = any (array(select json_array_elements_text(:rollouts::json)))
  and c.tools is not null;

-- name: delete_credits
delete from credits where transition in (
    select c.seq from transitions c join attempts a on a.id = c.attempt_id
    where a.rollout_id = any (array(select json_array_elements_text(:rollouts::json)))
);

-- name: delete_transitions
delete from transitions where attempt_id in (
    select id from attempts
    where rollout_id = any (array(select json_array_elements_text(:rollouts::json)))
);

-- name: delete_spans
delete from spans where attempt_id in (
    select id from attempts
    where rollout_id = any (array(select json_array_elements_text(:rollouts::json)))
);

-- name: delete_rewards
delete from rewards where attempt_id in (
    select id from attempts
    where rollout_id = any (array(select json_array_elements_text(:rollouts::json)))
);

-- name: delete_attempts
delete from attempts
where rollout_id = any (array(select json_array_elements_text(:rollouts::json)));

-- name: delete_rollouts
delete from rollouts
where id = any (array(select json_array_elements_text(:rollouts::json)));
