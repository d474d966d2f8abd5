-- name: attempt
select run_id, state, lease_until from attempts where id = ? for no key update;

-- name: rollouts
select r.*, case when g.state = 'trained' then g.trained_step end as trained_step
from rollouts r join groups g on g.id = r.group_id
where r.run_id = :run
  and (:purpose::text is null or r.purpose = :purpose)
  and (:step::bigint is null or r.step = :step)
  and (:state::text is null or r.state = :state)
  and (:trained::bigint is null or (g.state = 'trained' and g.trained_step = :trained))
order by r.group_id, r.position, r.seq limit nullif(:limit::bigint, -1);

-- name: rollouts_of_group
select r.*, case when g.state = 'trained' then g.trained_step end as trained_step
from rollouts r join groups g on g.id = r.group_id
where r.run_id = :run and r.group_id = :group
  and (:purpose::text is null or r.purpose = :purpose)
  and (:step::bigint is null or r.step = :step)
  and (:state::text is null or r.state = :state)
  and (:trained::bigint is null or (g.state = 'trained' and g.trained_step = :trained))
order by r.position, r.seq limit nullif(:limit::bigint, -1);

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
