-- name: lock_run
select * from runs where id = ? for no key update;

-- name: settled_groups
-- A locked group is growing, hence no longer settled.
select id from groups
where run_id = :run and purpose = 'train' and state = 'settled' and id <= coalesce(:until, id)
order by id limit :n
for no key update skip locked;
