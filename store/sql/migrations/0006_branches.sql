-- Branches: the rollout whose first calls a rollout repeats, and their number.

alter table rollouts add column branch_of text;
alter table rollouts add column branch_calls integer;
alter table transitions add column repeats text;  -- the call that was replayed; null: sampled
