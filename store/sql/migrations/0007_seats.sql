-- Who plays which role in one rollout, where that is not as the run file says.

alter table rollouts add column seats text;  -- JSON object, role: policy; null: none
