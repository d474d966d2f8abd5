-- name: attempt
select run_id, state, lease_until from attempts where id = ? for no key update;

-- name: rollouts
select * from rollouts
where run_id = :run
  and (:purpose::text is null or purpose = :purpose)
  and (:step::bigint is null or step = :step)
  and (:state::text is null or state = :state)
order by group_id, position, seq limit nullif(:limit::bigint, -1);

-- name: rollouts_of_group
select * from rollouts
where run_id = :run and group_id = :group
  and (:purpose::text is null or purpose = :purpose)
  and (:step::bigint is null or step = :step)
  and (:state::text is null or state = :state)
order by position, seq limit nullif(:limit::bigint, -1);

-- name: rewards
select attempt_id, scope, target, name, value, source from rewards
where attempt_id = any (array(select json_array_elements_text(?::json))) and late = 0
order by attempt_id, position;

-- name: transitions
select t.*, p.body as tools_body
from transitions t left join payloads p on p.hash = t.tools
where t.attempt_id = any (array(select json_array_elements_text(?::json)))
order by t.seq;

-- name: spans
select * from spans where attempt_id = ? order by started_at, seq;
