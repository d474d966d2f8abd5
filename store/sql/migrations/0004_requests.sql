-- Replies to calls with an idempotency key, for repeats.

create table requests (
    id text primary key,                -- verb and key
    digest text not null,               -- of the arguments
    reply text not null,                -- JSON
    at real not null
) strict, without rowid;
create index requests_by_time on requests (at);
