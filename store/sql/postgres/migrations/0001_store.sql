-- Times are unix seconds (spans: nanoseconds), user payloads are JSON text, tokens are
-- little-endian int32 and log-probs little-endian float32 bytes. Names are ordered as bytes.

create table runs (
    id text collate "C" primary key,
    epoch bigint not null,              -- grows with every owner; older ones are fenced
    step bigint not null default 0,     -- committed steps
    checkpoint text,
    config text not null,
    transitions bigint not null default 0,
    tokens bigint not null default 0,   -- completion tokens
    created_at double precision not null
);

create table groups (
    id text collate "C" primary key,
    run_id text collate "C" not null references runs (id),
    purpose text not null,
    step bigint not null,
    state text not null,                -- open, settled, claimed, trained
    pending bigint not null,            -- rollouts that are not terminal
    claimed_epoch bigint,
    trained_step bigint
);

create index groups_by_state on groups (run_id, purpose, state, id);

create table rollouts (
    seq bigint generated always as identity primary key,  -- order of arrival
    id text collate "C" not null unique,
    run_id text collate "C" not null references runs (id),
    group_id text collate "C" not null references groups (id),
    position bigint not null,
    purpose text not null,
    step bigint not null,
    state text not null,                -- queued, running, succeeded, failed, cancelled
    priority bigint not null,
    max_attempts bigint not null,
    timeout double precision not null,
    attempts bigint not null default 0,
    attempt_id text collate "C",        -- the last one
    seconds double precision not null default 0,
    error_kind text,
    error_message text,
    error_traceback text,
    sampling text not null,
    task text not null,
    result text
);

create index rollouts_by_group on rollouts (run_id, group_id, position);
create index rollouts_by_state on rollouts (run_id, state);
create index rollouts_queue on rollouts (priority desc, seq) where state = 'queued';
create index rollouts_queue_of_run on rollouts (run_id, priority desc, seq) where state = 'queued';

create table attempts (
    seq bigint generated always as identity,
    id text collate "C" primary key,    -- OpenTelemetry trace id
    rollout_id text collate "C" not null references rollouts (id),
    run_id text collate "C" not null,
    fence bigint not null,
    state text not null,                -- running, succeeded, failed, expired, cancelled
    runner text not null,
    claim_id text collate "C",
    lease_until double precision not null,
    started_at double precision not null,
    ended_at double precision,
    outcome bytea,                      -- digest of the accepted outcome: a repeat is recognised
    error_kind text,
    error_message text,
    error_traceback text,
    unique (rollout_id, fence)
);

create index attempts_by_lease on attempts (lease_until) where state = 'running';
create index attempts_by_claim on attempts (claim_id) where claim_id is not null;

create table payloads (
    hash bytea primary key,             -- of the body
    body text not null
);

create table transitions (
    seq bigint generated always as identity primary key,  -- order of arrival
    id text collate "C" not null unique,
    attempt_id text collate "C" not null references attempts (id),
    position bigint not null,
    late bigint not null,               -- written under an old fence or lease: never trained
    parent bigint,                      -- deepest earlier transition whose tokens are a prefix
    size bigint not null,               -- bytes of all tokens, prompt and completion
    digest bytea not null,              -- of all tokens, prompt and completion
    chat_parent bigint,                 -- deepest earlier transition whose messages are a prefix
    chat_shared bigint not null,        -- messages taken from it, its answer counted last
    chat_size bigint not null,          -- bytes of all messages, one JSON line each
    chat_digest bytea not null,         -- of all messages
    answer_digest bytea,
    tools bytea,                        -- payloads.hash
    role text not null,
    policy text collate "C" not null,
    version bigint,
    finish text not null,
    exact bigint not null,
    span_id text collate "C",
    started_at double precision not null,
    seconds double precision not null,
    sampling text not null,
    prompt bytea not null,              -- tokens after the parent's
    completion bytea not null,
    logprobs bytea not null,
    messages text not null,             -- messages after the chat parent's
    answer text
);

create index transitions_by_attempt on transitions (attempt_id);

create table spans (
    seq bigint generated always as identity,
    attempt_id text collate "C" not null references attempts (id),
    id text collate "C" not null,
    parent_id text collate "C",
    name text collate "C" not null,
    kind text not null,
    started_at bigint not null,
    ended_at bigint not null,
    ok bigint not null,
    late bigint not null,
    attributes text not null,
    unique (attempt_id, id)
);

create table rewards (
    attempt_id text collate "C" not null references attempts (id),
    late bigint not null,
    position bigint not null,
    scope text not null,                -- transition, role, rollout
    target text,
    name text collate "C" not null,
    value double precision not null,
    source text not null,
    primary key (attempt_id, late, position)
);

create table steps (
    run_id text collate "C" not null references runs (id),
    step bigint not null,
    committed bigint not null,          -- 0: only logged so far
    at double precision not null,
    record text,                        -- the whole commit as JSON: a repeat is recognised
    primary key (run_id, step)
);

create table metrics (
    run_id text collate "C" not null references runs (id),
    step bigint not null,
    name text collate "C" not null,
    value double precision,             -- null: not a number
    primary key (run_id, step, name)
);

create table policies (
    run_id text collate "C" not null references runs (id),
    policy text collate "C" not null,
    version bigint not null,
    base_url text not null,
    model text not null,
    primary key (run_id, policy)
);

create table events (
    seq bigint generated always as identity primary key,
    run_id text collate "C" not null,
    kind text not null,                 -- run, group, rollout, attempt, step, policy
    id text collate "C" not null
);
