-- name: put_document
insert into documents (run_id, kind, key, value) values (:run, :kind, :key, :value)
on conflict (run_id, kind, key) do update set value = excluded.value where :replace = 1;

-- name: document
select value from documents where run_id = ? and kind = ? and key = ?;

-- name: documents
select key, value from documents where run_id = ? and kind = ? and key > ? order by seq;
