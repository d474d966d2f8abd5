-- Data sets of pairs and labels, judgements, and log-probs of frozen models.

create table datasets (
    name text collate "C" not null,
    version bigint not null,
    spec text not null,                 -- JSON: how it was made
    digest text collate "C",                        -- of its items in order; null: it is still being made
    created_at double precision not null,
    primary key (name, version)
);

create table sides (
    digest text collate "C" primary key,            -- of its tokens
    rollout_id text collate "C",                    -- null: the side's calls are its own
    first_call bigint not null,
    calls bigint,                      -- null: to the last
    own bytea                           -- the calls, where they are imported or copied
);

create index sides_by_rollout on sides (rollout_id) where own is null;

create table items (
    dataset text collate "C" not null,
    version bigint not null,
    position bigint not null,
    id text collate "C" not null,                   -- of its content
    kind text not null,                 -- pair, label, steps, demonstration
    chosen text not null,               -- sides.digest
    rejected text,
    label double precision,
    steps text not null,                -- JSON: a number or null for each call
    margin double precision,
    weight double precision not null,
    split text collate "C" not null,
    source text not null,
    primary key (dataset, version, position)
);

create unique index items_by_id on items (dataset, version, id);

create table judgements (
    id text collate "C" primary key,                -- of what the judge was asked
    subject text not null,
    judge text not null,
    verdict text not null,              -- JSON
    reason text not null,
    raw text not null,
    cost double precision not null,                 -- USD
    seconds double precision not null,
    at double precision not null
);

create table logprobs (
    model text collate "C" not null,                -- digest of the weights
    side text collate "C" not null,                 -- sides.digest
    logprobs bytea not null,             -- float32, of each sampled token
    primary key (model, side)
);
