-- PostgreSQL reuses the space of removed rows automatically; only a vacuum knows its size.
-- name: size
select pg_database_size(current_database()) as bytes, 0 as free;

-- name: lock_payloads
lock table payloads in share row exclusive mode;

-- Its size is the server's.
-- name: large_cache
select 1;

-- name: lock_groups
select id from groups
where id in (
    select group_id from rollouts
    where id = any (array(select json_array_elements_text(:rollouts::json)))
)
order by id for no key update;
