-- Which versions of a policy sampled the tokens of a call during which its weights were updated.

alter table transitions add column spans text;  -- JSON [[first token, version], ...]; null: one
