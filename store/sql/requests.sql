-- name: lock_request
select null;  -- not needed: there is only one writer

-- name: request
select digest, reply from requests where id = ?;

-- name: add_request
insert into requests (id, digest, reply, at) values (:id, :digest, :reply, :at);

-- name: forget_requests
delete from requests where at < ?;
