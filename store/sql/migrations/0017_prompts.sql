-- Prompt searches: candidates, calls to the reflector, and notes of rewards.

create table candidates (
    seq integer primary key,            -- order of arrival
    run_id text not null references runs (id),
    id text not null,                   -- of its texts
    step integer not null,
    parents text not null,              -- a JSON list of ids
    state text not null,                -- proposed, rejected, accepted, chosen
    texts text not null,                -- a JSON list
    reflection text,                    -- reflections.id; null: none
    unique (run_id, id)
) strict;

create table reflections (
    seq integer primary key,            -- order of arrival
    id text not null unique,
    run_id text not null references runs (id),
    step integer not null,
    question text not null,
    answer text not null,
    prompt_tokens integer not null,
    completion_tokens integer not null,
    seconds real not null
) strict;

create index reflections_by_run on reflections (run_id, seq);
alter table rollouts add column candidate text;  -- candidates.id of its run; null: none
alter table rewards add column note text not null default '';
