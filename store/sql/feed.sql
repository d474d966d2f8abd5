-- name: add_events
insert into events (run_id, kind, id)
select json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]')
from json_each(?);

-- name: shrink_group
update groups
set pending = pending - :n, state = case when pending = :n then 'settled' else state end
where id = :group
returning state, purpose;

-- name: count
update runs set
    transitions = transitions + :transitions,
    inexact = inexact + :inexact,
    tokens = tokens + :tokens,
    queued = queued + :queued,
    running = running + :running,
    succeeded = succeeded + :succeeded,
    failed = failed + :failed,
    cancelled = cancelled + :cancelled,
    groups_open = groups_open + :groups_open,
    groups_settled = groups_settled + :groups_settled,
    groups_trained = groups_trained + :groups_trained,
    groups_discarded = groups_discarded + :groups_discarded
where id = :run;

-- name: cursor
select coalesce(max(seq), 0) as newest from events;
