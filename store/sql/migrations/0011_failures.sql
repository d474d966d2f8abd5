-- Failed attempts of a run are counted by kind while it is running.

create index attempts_by_failure on attempts (run_id, error_kind, ended_at)
where error_kind is not null;
