-- name: attempts
select id, run_id, state, lease_until from attempts
where id = any (array(select json_array_elements_text(:attempts::json)))
order by id
for no key update;

-- name: check_known
-- A statement of its own: the one that locks does not see what was added while it waited.
select (case
    when (select count(*) from transitions where attempt_id = value ->> 0) = (value ->> 1)::bigint
        and (
            select state = 'running'
                and lease_until > coalesce(:now, extract(epoch from clock_timestamp())::float8)
            from attempts where id = value ->> 0
        )
    then 'true' else 'changed'
end)::json as unchanged
from json_array_elements(:known::json);
