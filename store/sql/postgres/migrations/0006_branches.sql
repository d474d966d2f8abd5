-- Rollouts that begin as another one did: which, and how many of its calls they repeat.

alter table rollouts add column branch_of text;
alter table rollouts add column branch_calls bigint;
alter table transitions add column repeats text;  -- the call that was replayed; null: sampled
