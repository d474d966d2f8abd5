-- name: lock_run
select * from runs where id = ? for no key update;
