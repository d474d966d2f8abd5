-- name: add_events
insert into events (run_id, kind, id)
select json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]')
from json_each(?);

-- name: cursor
select coalesce(max(seq), 0) from events;
