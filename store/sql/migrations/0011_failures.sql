-- What attempts of a run failed of is counted by kind while the run works.

create index attempts_by_failure on attempts (run_id, error_kind, ended_at)
where error_kind is not null;
