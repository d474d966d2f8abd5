-- name: sides
select * from sides where digest = any (array(select json_array_elements_text(?::json)));

-- name: references
select digest from sides
where own is null and rollout_id = any (array(select json_array_elements_text(?::json)));

-- name: attempts
select id, attempt_id from rollouts
where id = any (array(select json_array_elements_text(?::json)));

-- name: logprobs
select side, logprobs from logprobs
where model = :model and side = any (array(select json_array_elements_text(:sides::json)));
