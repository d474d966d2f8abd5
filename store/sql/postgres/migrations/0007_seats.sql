-- Policies of a rollout's roles, if they differ from the run file's.

alter table rollouts add column seats text;  -- JSON object, role: policy; null: none
