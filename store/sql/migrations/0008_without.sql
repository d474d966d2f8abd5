-- Branches in which others have the seats of some roles: which roles these are.

alter table rollouts add column branch_without text;  -- JSON array of roles; null: none
