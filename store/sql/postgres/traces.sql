-- name: attempts
select id, run_id, state, lease_until from attempts
where id = any (array(select json_array_elements_text(:attempts::json)))
order by id
for no key update;

-- name: tree
select id, attempt_id, late, seq, size, digest, chat_size, chat_digest, answer_digest
from transitions
where attempt_id = any (array(select json_array_elements_text(:attempts::json)))
   or id = any (array(select json_array_elements_text(:ids::json)));

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
