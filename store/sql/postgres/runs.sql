-- name: lock_run
select * from runs where id = ? for no key update;

-- name: settled_groups
-- A group that is locked is growing: it will not be settled any more.
select id from groups
where run_id = ? and purpose = 'train' and state = 'settled'
order by id limit ?
for no key update skip locked;

-- name: calls
select t.id, t.seq
from rollouts r join transitions t on t.attempt_id = r.attempt_id
where r.run_id = :run
  and r.group_id = any (array(select json_array_elements_text(:groups::json)))
  and t.late = 0;
