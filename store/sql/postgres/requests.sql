-- name: lock_request
select pg_advisory_xact_lock(hashtextextended(:id, 1));

-- name: forget_requests
delete from requests
where id in (select id from requests where at < ? for update skip locked);
