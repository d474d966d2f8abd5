-- Data sets of pairs and labels, judgements, and log-probs of frozen models.

create table datasets (
    name text not null,
    version integer not null,
    spec text not null,                 -- JSON: how it was made
    digest text,                        -- of its items in order; null: it is still being made
    created_at real not null,
    primary key (name, version)
) strict, without rowid;

create table sides (
    digest text primary key,            -- of its tokens
    rollout_id text,                    -- null: the side's calls are its own
    first_call integer not null,
    calls integer,                      -- null: to the last
    own blob                            -- the calls, where they are imported or copied
) strict;

create index sides_by_rollout on sides (rollout_id) where own is null;

create table items (
    dataset text not null,
    version integer not null,
    position integer not null,
    id text not null,                   -- of its content
    kind text not null,                 -- pair, label, steps, demonstration
    chosen text not null,               -- sides.digest
    rejected text,
    label real,
    steps text not null,                -- JSON: a number or null for each call
    margin real,
    weight real not null,
    split text not null,
    source text not null,
    primary key (dataset, version, position)
) strict, without rowid;

create unique index items_by_id on items (dataset, version, id);

create table judgements (
    id text primary key,                -- of what the judge was asked
    subject text not null,
    judge text not null,
    verdict text not null,              -- JSON
    reason text not null,
    raw text not null,
    cost real not null,                 -- USD
    seconds real not null,
    at real not null
) strict;

create table logprobs (
    model text not null,                -- digest of the weights
    side text not null,                 -- sides.digest
    logprobs blob not null,             -- float32, of each sampled token
    primary key (model, side)
) strict, without rowid;
