-- name: attempts
select id, run_id, state, lease_until from attempts
where id = any (array(select json_array_elements_text(:attempts::json)))
order by id
for no key update;
