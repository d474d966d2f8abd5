-- Curves, lists and searches find the rows of a page without reading the whole run.

create index rollouts_by_step on rollouts (run_id, step, seq);
create index rollouts_unsuccessful on rollouts (run_id, state, step, seq)
where state <> 'succeeded';
create index metrics_by_name on metrics (run_id, name, step);
create index groups_by_purpose on groups (run_id, purpose, id);
create index groups_by_step on groups (run_id, step, id);
create index groups_by_training on groups (run_id, trained_step, id)
where trained_step is not null;
