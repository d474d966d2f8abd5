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
    created_at real not null,
    inexact integer not null default 0,  -- of transitions: without ids
    queued integer not null default 0,  -- rollouts by state
    running integer not null default 0,
    succeeded integer not null default 0,
    failed integer not null default 0,
    cancelled integer not null default 0,
    groups_open integer not null default 0,  -- training groups by state
    groups_settled integer not null default 0,  -- claimed ones too
    groups_trained integer not null default 0,
    groups_discarded integer not null default 0,
    owner text not null default '',     -- who holds the run, as it describes itself; '': nobody
    owned_until real not null default 0
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
create index groups_by_purpose on groups (run_id, purpose, id);
create index groups_by_step on groups (run_id, step, id);
create index groups_by_training on groups (run_id, trained_step, id)
where trained_step is not null;

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
    result text,
    branch_of text,                     -- the rollout whose first calls it repeats
    branch_calls integer,               -- number of these calls
    seats text,                         -- JSON object, role: policy; null: none
    branch_without text,                -- JSON array of roles; null: none
    together integer,                   -- its runner may hold so many; null: any number
    ran text,                           -- JSON of the unscored run; null: the agent has yet to run
    candidate text                      -- candidates.id of its run; null: none
) strict;
create index rollouts_by_group on rollouts (run_id, group_id, position);
create index rollouts_queue on rollouts (priority desc, seq) where state = 'queued';
create index rollouts_queue_of_run on rollouts (run_id, priority desc, seq) where state = 'queued';
create index rollouts_suspect on rollouts (state)
where together is not null and state in ('queued', 'running');
create index rollouts_by_step on rollouts (run_id, step);
create index rollouts_unsuccessful on rollouts (run_id, state, step) where state <> 'succeeded';

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
    together integer,                   -- its silent runner held so many; null: not silent
    lease real not null default 3600,   -- seconds
    unique (rollout_id, fence)
) strict;
create index attempts_by_lease on attempts (lease_until) where state = 'running';
create index attempts_by_claim on attempts (claim_id) where claim_id is not null;
create index attempts_by_failure on attempts (run_id, error_kind, ended_at)
where error_kind is not null;

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
    answer text,
    repeats text,                       -- the call that was replayed; null: sampled
    left_out text,                      -- JSON: options without effect; null: none
    spans text,                         -- JSON [[first token, version], ...]; null: one
    images blob                         -- digests in order, 32 bytes each; null: none
) strict;
create index transitions_by_attempt on transitions (attempt_id);
create index transitions_by_tools on transitions (tools) where tools is not null;

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
    step integer,                       -- null: it came with the attempt
    note text not null default '',
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
create index metrics_by_name on metrics (run_id, name, step);

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

-- Replies to calls with an idempotency key, for repeats.
create table requests (
    id text primary key,                -- verb and key
    digest text not null,               -- of the arguments
    reply text not null,                -- JSON
    at real not null
) strict, without rowid;
create index requests_by_time on requests (at);

-- Credit of the calls that a step trained.
create table credits (
    transition integer not null references transitions (seq),
    policy text not null,
    step integer not null,
    advantage blob not null,            -- float32: one number for each token, or one for all
    baseline blob not null,             -- of each comparison after the other
    gate blob not null,
    weight blob not null,
    psi blob not null,
    primary key (transition, policy)
) strict, without rowid;

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

-- Values that a feature keeps with a run, such as the candidates of a prompt search.
create table documents (
    seq integer primary key,            -- order of arrival
    run_id text not null references runs (id),
    kind text not null,
    key text not null,
    value text not null,                -- JSON
    unique (run_id, kind, key)
) strict;

-- Images of calls: each file once, by its digest, and who refers to it. A prune removes those that
-- nothing refers to.
create table images (
    digest text primary key,            -- sha256 of the body, hexadecimal
    media_type text not null,
    width integer not null,
    height integer not null,
    put_at real not null,               -- the last time; its call may still be in flight
    body blob not null
) strict;

create table rollout_images (
    rollout_id text not null,
    digest text not null references images (digest),
    primary key (rollout_id, digest)
) strict, without rowid;
create index rollout_images_by_digest on rollout_images (digest);

create table side_images (
    side text not null,                 -- sides.digest, of a side with its own calls
    digest text not null references images (digest),
    primary key (side, digest)
) strict, without rowid;
create index side_images_by_digest on side_images (digest);
