-- The counters that `counts` returns are stored with the run, and a call finds the call that it
-- continues without reading the others of its attempt.

alter table runs add column inexact integer not null default 0;  -- of transitions: without ids
alter table runs add column queued integer not null default 0;   -- rollouts by state
alter table runs add column running integer not null default 0;
alter table runs add column succeeded integer not null default 0;
alter table runs add column failed integer not null default 0;
alter table runs add column cancelled integer not null default 0;
alter table runs add column groups_open integer not null default 0;  -- training groups by state
alter table runs add column groups_settled integer not null default 0;  -- claimed ones too
alter table runs add column groups_trained integer not null default 0;

update runs set
    inexact = (
        select count(*) from transitions t join attempts a on a.id = t.attempt_id
        where a.run_id = runs.id and t.late = 0 and t.exact = 0
    ),
    queued = (select count(*) from rollouts r where r.run_id = runs.id and r.state = 'queued'),
    running = (select count(*) from rollouts r where r.run_id = runs.id and r.state = 'running'),
    succeeded = (select count(*) from rollouts r where r.run_id = runs.id and r.state = 'succeeded'),
    failed = (select count(*) from rollouts r where r.run_id = runs.id and r.state = 'failed'),
    cancelled = (select count(*) from rollouts r where r.run_id = runs.id and r.state = 'cancelled'),
    groups_open = (
        select count(*) from groups g
        where g.run_id = runs.id and g.purpose = 'train' and g.state = 'open'
    ),
    groups_settled = (
        select count(*) from groups g
        where g.run_id = runs.id and g.purpose = 'train' and g.state in ('settled', 'claimed')
    ),
    groups_trained = (
        select count(*) from groups g
        where g.run_id = runs.id and g.purpose = 'train' and g.state = 'trained'
    );

drop index rollouts_by_state;
drop index transitions_by_attempt;
create index transitions_by_tokens on transitions (attempt_id, size, digest);
create index transitions_by_chat on transitions (attempt_id, chat_size, chat_digest, answer_digest);
