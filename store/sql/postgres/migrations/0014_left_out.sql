-- Options of a model call that had no effect, such as fields that only its API's own server reads.

alter table transitions add column left_out text;  -- a JSON list; null: none
