-- Times are unix seconds (spans: nanoseconds), user payloads are JSON text, tokens are
-- little-endian int32 blobs and log-probs little-endian float32 blobs.

create table runs (
    id text primary key,
    epoch integer not null,             -- grows with every owner; older ones are fenced
    step integer not null default 0,    -- committed steps
    checkpoint text,
    config text not null,
    transitions integer not null default 0,
    tokens integer not null default 0,  -- completion tokens
    created_at real not null
) strict;

create table groups (
    id text primary key,
    run_id text not null references runs (id),
    purpose text not null,
    step integer not null,
    state text not null,                -- open, settled, claimed, trained
    pending integer not null,           -- rollouts that are not terminal
    claimed_epoch integer,
    trained_step integer
) strict;

create index groups_by_state on groups (run_id, purpose, state, id);

create table rollouts (
    seq integer primary key,            -- order of arrival
    id text not null unique,
    run_id text not null references runs (id),
    group_id text not null references groups (id),
    position integer not null,
    purpose text not null,
    step integer not null,
    state text not null,                -- queued, running, succeeded, failed, cancelled
    priority integer not null,
    max_attempts integer not null,
    timeout real not null,
    attempts integer not null default 0,
    attempt_id text,                    -- the last one
    seconds real not null default 0,
    error_kind text,
    error_message text,
    error_traceback text,
    sampling text not null,
    task text not null,
    result text
) strict;

create index rollouts_by_group on rollouts (run_id, group_id, position);
create index rollouts_by_state on rollouts (run_id, state);
create index rollouts_queue on rollouts (priority desc, seq) where state = 'queued';
create index rollouts_queue_of_run on rollouts (run_id, priority desc, seq) where state = 'queued';

create table attempts (
    id text primary key,                -- OpenTelemetry trace id
    rollout_id text not null references rollouts (id),
    run_id text not null,
    fence integer not null,
    state text not null,                -- running, succeeded, failed, expired, cancelled
    runner text not null,
    claim_id text,
    lease_until real not null,
    started_at real not null,
    ended_at real,
    outcome blob,                       -- digest of the accepted outcome: a repeat is recognised
    error_kind text,
    error_message text,
    error_traceback text,
    unique (rollout_id, fence)
) strict;

create index attempts_by_lease on attempts (lease_until) where state = 'running';
create index attempts_by_claim on attempts (claim_id) where claim_id is not null;

create table payloads (
    hash blob primary key,              -- of the body
    body text not null
) strict;

create table transitions (
    seq integer primary key,            -- order of arrival
    id text not null unique,
    attempt_id text not null references attempts (id),
    position integer not null,
    late integer not null,              -- written under an old fence or lease: never trained
    parent integer,                     -- deepest earlier transition whose tokens are a prefix
    size integer not null,              -- bytes of all tokens, prompt and completion
    digest blob not null,               -- of all tokens, prompt and completion
    chat_parent integer,                -- deepest earlier transition whose messages are a prefix
    chat_shared integer not null,       -- messages taken from it, its answer counted last
    chat_size integer not null,         -- bytes of all messages, one JSON line each
    chat_digest blob not null,          -- of all messages
    answer_digest blob,
    tools blob,                         -- payloads.hash
    role text not null,
    policy text not null,
    version integer,
    finish text not null,
    exact integer not null,
    span_id text,
    started_at real not null,
    seconds real not null,
    sampling text not null,
    prompt blob not null,               -- tokens after the parent's
    completion blob not null,
    logprobs blob not null,
    messages text not null,             -- messages after the chat parent's
    answer text
) strict;

create index transitions_by_attempt on transitions (attempt_id);

create table spans (
    attempt_id text not null references attempts (id),
    id text not null,
    parent_id text,
    name text not null,
    kind text not null,
    started_at integer not null,
    ended_at integer not null,
    ok integer not null,
    late integer not null,
    attributes text not null,
    unique (attempt_id, id)
) strict;

create table rewards (
    attempt_id text not null references attempts (id),
    late integer not null,
    position integer not null,
    scope text not null,                -- transition, role, rollout
    target text,
    name text not null,
    value real not null,
    source text not null,
    primary key (attempt_id, late, position)
) strict, without rowid;

create table steps (
    run_id text not null references runs (id),
    step integer not null,
    committed integer not null,         -- 0: only logged so far
    at real not null,
    record text,                        -- the whole commit as JSON: a repeat is recognised
    primary key (run_id, step)
) strict, without rowid;

create table metrics (
    run_id text not null references runs (id),
    step integer not null,
    name text not null,
    value real,                         -- null: not a number
    primary key (run_id, step, name)
) strict, without rowid;

create table policies (
    run_id text not null references runs (id),
    policy text not null,
    version integer not null,
    base_url text not null,
    model text not null,
    primary key (run_id, policy)
) strict, without rowid;

create table events (
    seq integer primary key autoincrement,
    run_id text not null,
    kind text not null,                 -- run, group, rollout, attempt, step, policy
    id text not null
) strict;
