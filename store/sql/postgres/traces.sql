-- name: attempt
select run_id, state, lease_until from attempts where id = ? for no key update;

-- name: tree
select 2 as kind, attempt_id, chat_size as size, chat_digest as digest, answer_digest as answer,
    max(seq) as seq, '' as id, 0 as late
from transitions
where attempt_id = any (array(select json_array_elements_text(:attempts::json)))
  and chat_size > 0
group by attempt_id, chat_size, chat_digest, answer_digest
union all
select 1, attempt_id, size, digest, null, max(seq), '', 0 from transitions
where attempt_id = any (array(select json_array_elements_text(:attempts::json))) and size > 0
group by attempt_id, size, digest
union all
select 0, attempt_id, 0, null, null, seq, id, late from transitions
where id = any (array(select json_array_elements_text(:ids::json)))
order by size desc, digest desc, seq desc;

-- name: rewards
select attempt_id, scope, target, name, value, source, note from rewards
where attempt_id = any (array(select json_array_elements_text(:attempts::json))) and late = :late
order by attempt_id, position;

-- name: transitions
select t.*, p.body as tools_body
from transitions t left join payloads p on p.hash = t.tools
where t.attempt_id = any (array(select json_array_elements_text(?::json)))
order by t.seq;

-- name: spans
select * from spans where attempt_id = ? order by started_at, seq;

-- name: rollouts_few_sorted
order by r.group_id, r.position, r.seq
