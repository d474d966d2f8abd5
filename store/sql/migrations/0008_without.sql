-- Roles of a branch that other policies play.

alter table rollouts add column branch_without text;  -- JSON array of roles; null: none
