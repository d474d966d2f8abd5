-- name: add_events
-- Holding the lock until the commit makes event numbers visible in order.
with locked as materialized (select pg_advisory_xact_lock(1634888753))
insert into events (run_id, kind, id)
select event ->> 0, event ->> 1, event ->> 2
from locked, json_array_elements(?::json) with ordinality as listed (event, number)
order by number;
