-- The rows of a store of schema 0001 in which everything has happened once.

insert into runs (id, epoch, step, checkpoint, config, transitions, tokens, created_at) values
    ('run', 1, 1, 'step-0', '{"seed":1}', 6, 7, 1700000000.0),
    ('other', 1, 0, NULL, '{}', 1, 1, 1700000000.0);

insert into groups (id, run_id, purpose, step, state, pending, claimed_epoch, trained_step) values
    ('trained', 'run', 'train', 0, 'trained', 0, 1, 0),
    ('claimed', 'run', 'train', 0, 'claimed', 0, 1, NULL),
    ('settled', 'run', 'train', 0, 'settled', 0, NULL, NULL),
    ('open', 'run', 'train', 0, 'open', 2, NULL, NULL),
    ('eval', 'run', 'eval', 0, 'open', 1, NULL, NULL),
    ('far', 'other', 'train', 0, 'open', 1, NULL, NULL);

insert into rollouts (seq, id, run_id, group_id, position, purpose, step, state, priority, max_attempts, timeout, attempts, attempt_id, seconds, error_kind, error_message, error_traceback, sampling, task, result) values
    (1, 'trained/0', 'run', 'trained', 0, 'train', 0, 'succeeded', 0, 3, 60.0, 1, '9b42e90a198d467493b8dcf89bc42c8e', 0.0, NULL, NULL, NULL, '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', '{"input":"trained"}', '{"x":1}'),
    (2, 'claimed/0', 'run', 'claimed', 0, 'train', 0, 'succeeded', 0, 3, 60.0, 1, '5b080595a8bf4e0193e4cdb7516b6e12', 0.0, NULL, NULL, NULL, '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', '{"input":"claimed"}', 'null'),
    (3, 'claimed/1', 'run', 'claimed', 1, 'train', 0, 'failed', 0, 3, 60.0, 1, '89a31bd7e48840069360c02dcd5388a6', 0.0, 'agent_error', 'boom', '', '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', '{"input":"claimed"}', 'null'),
    (4, 'claimed/2', 'run', 'claimed', 2, 'train', 0, 'cancelled', 0, 3, 60.0, 0, NULL, 0.0, 'cancelled', 'The rollout was cancelled.', '', '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', '{"input":"claimed"}', NULL),
    (5, 'settled/0', 'run', 'settled', 0, 'train', 0, 'succeeded', 0, 3, 60.0, 1, '1bba7619409f4d0cb9c1e12047fdc65b', 0.0, NULL, NULL, NULL, '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', '{"input":"settled"}', 'null'),
    (6, 'open/0', 'run', 'open', 0, 'train', 0, 'running', 0, 3, 60.0, 2, '69c390ea58154aa096220c5057f8c9c3', 0.0, NULL, NULL, NULL, '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', '{"input":"open"}', NULL),
    (7, 'open/1', 'run', 'open', 1, 'train', 0, 'queued', 0, 3, 60.0, 0, NULL, 0.0, NULL, NULL, NULL, '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', '{"input":"open"}', NULL),
    (8, 'eval/0', 'run', 'eval', 0, 'eval', 0, 'queued', 0, 3, 60.0, 0, NULL, 0.0, NULL, NULL, NULL, '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', '{"input":"eval"}', NULL),
    (9, 'far/0', 'other', 'far', 0, 'train', 0, 'running', 0, 3, 60.0, 1, '47f444b8eca54757b892d8df2525c810', 0.0, NULL, NULL, NULL, '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', '{"input":"far"}', NULL);

insert into attempts (id, rollout_id, run_id, fence, state, runner, claim_id, lease_until, started_at, ended_at, outcome, error_kind, error_message, error_traceback) values
    ('9b42e90a198d467493b8dcf89bc42c8e', 'trained/0', 'run', 1, 'succeeded', 'r', NULL, 1700000010.0, 1700000000.0, 1700000000.0, X'4E3768765211AA25EDFAF4271F200E3C', NULL, NULL, NULL),
    ('5b080595a8bf4e0193e4cdb7516b6e12', 'claimed/0', 'run', 1, 'succeeded', 'r', NULL, 1700000010.0, 1700000000.0, 1700000000.0, X'EA12DB4F6FB2626D2F9EBEA7BEFCD6A3', NULL, NULL, NULL),
    ('89a31bd7e48840069360c02dcd5388a6', 'claimed/1', 'run', 1, 'failed', 'r', NULL, 1700000010.0, 1700000000.0, 1700000000.0, X'85A5EF30034515FAA9469CAC3895CBA4', 'agent_error', 'boom', ''),
    ('1bba7619409f4d0cb9c1e12047fdc65b', 'settled/0', 'run', 1, 'succeeded', 'r', NULL, 1700000010.0, 1700000000.0, 1700000000.0, X'97FBA49EC66A99342DB9E8FC5D33F59D', NULL, NULL, NULL),
    ('39be1363479741bbb8d1a840675ad36c', 'open/0', 'run', 1, 'expired', 'r', NULL, 1700000010.0, 1700000000.0, 1700000010.0, NULL, 'lost_runner', 'The runner of attempt 1 of 3 sent no heartbeat.', ''),
    ('69c390ea58154aa096220c5057f8c9c3', 'open/0', 'run', 2, 'running', 'r', NULL, 1700000020.0, 1700000010.0, NULL, NULL, NULL, NULL, NULL),
    ('47f444b8eca54757b892d8df2525c810', 'far/0', 'other', 1, 'running', 'r', NULL, 1700000020.0, 1700000010.0, NULL, NULL, NULL, NULL, NULL);

insert into payloads (hash, body) values
    (X'D468E3E1EF35A88D788FC214961A2082', '[{"type":"function","function":{"name":"look"}}]');

insert into transitions (seq, id, attempt_id, position, late, parent, size, digest, chat_parent, chat_shared, chat_size, chat_digest, answer_digest, tools, role, policy, version, finish, exact, span_id, started_at, seconds, sampling, prompt, completion, logprobs, messages, answer) values
    (1, 'call-0', '9b42e90a198d467493b8dcf89bc42c8e', 0, 0, NULL, 12, X'B30A3C159D7E8193559A42A84F1FCAE1', NULL, 0, 30, X'EE0C18F5CAA1BCD7B3F4EC8C820F1B1D', X'0C65C786C57AE4C2AEE9447B0A784AA7', X'D468E3E1EF35A88D788FC214961A2082', 'agent', 'policy', NULL, 'stop', 1, NULL, 0.0, 0.0, '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', X'0100000002000000', X'03000000', X'000000BF', '[{"role":"user","content":"q"}]', '{"role":"assistant","content":"a"}'),
    (2, 'call-1', '9b42e90a198d467493b8dcf89bc42c8e', 1, 0, 1, 24, X'741000CB8844E9075E3B5BD126CEFCB8', 1, 2, 98, X'ABCFB63210F7A96E16E4138940A6C8B5', X'0C65C786C57AE4C2AEE9447B0A784AA7', X'D468E3E1EF35A88D788FC214961A2082', 'agent', 'policy', NULL, 'stop', 1, NULL, 0.0, 0.0, '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', X'04000000', X'0500000006000000', X'000000BF000000BF', '[{"role":"user","content":"more"}]', '{"role":"assistant","content":"a"}'),
    (3, 'call-2', '9b42e90a198d467493b8dcf89bc42c8e', 2, 0, NULL, 8, X'0A7226B28B48EB387CC4C0243B860985', NULL, 0, 0, X'CAE66941D9EFBD404E4D88758EA67670', NULL, NULL, 'critic', 'policy', NULL, 'stop', 1, NULL, 0.0, 0.0, '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', X'09000000', X'08000000', X'000000BF', '[]', NULL),
    (4, 'call-3', '5b080595a8bf4e0193e4cdb7516b6e12', 3, 0, NULL, 4, X'99850724010E3222888EEB8478C9FFD3', NULL, 0, 0, X'CAE66941D9EFBD404E4D88758EA67670', NULL, NULL, 'agent', 'policy', NULL, 'stop', 0, NULL, 0.0, 0.0, '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', X'', X'07000000', X'', '[]', NULL),
    (5, 'call-4', '39be1363479741bbb8d1a840675ad36c', 4, 0, NULL, 8, X'2CC5E4D47C5F3C5FBE635A5A5B7BB392', NULL, 0, 0, X'CAE66941D9EFBD404E4D88758EA67670', NULL, NULL, 'agent', 'policy', NULL, 'stop', 1, NULL, 0.0, 0.0, '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', X'01000000', X'02000000', X'000000BF', '[]', NULL),
    (6, 'call-5', '39be1363479741bbb8d1a840675ad36c', 5, 1, 5, 12, X'B30A3C159D7E8193559A42A84F1FCAE1', NULL, 0, 0, X'CAE66941D9EFBD404E4D88758EA67670', NULL, NULL, 'agent', 'policy', NULL, 'stop', 1, NULL, 0.0, 0.0, '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', X'', X'03000000', X'000000BF', '[]', NULL),
    (7, 'call-6', '69c390ea58154aa096220c5057f8c9c3', 6, 0, NULL, 8, X'2CC5E4D47C5F3C5FBE635A5A5B7BB392', NULL, 0, 0, X'CAE66941D9EFBD404E4D88758EA67670', NULL, NULL, 'agent', 'policy', NULL, 'stop', 1, NULL, 0.0, 0.0, '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', X'01000000', X'02000000', X'000000BF', '[]', NULL),
    (8, 'call-7', '47f444b8eca54757b892d8df2525c810', 7, 0, NULL, 8, X'2CC5E4D47C5F3C5FBE635A5A5B7BB392', NULL, 0, 0, X'CAE66941D9EFBD404E4D88758EA67670', NULL, NULL, 'agent', 'policy', NULL, 'stop', 1, NULL, 0.0, 0.0, '{"temperature":1.0,"top_p":1.0,"top_k":0,"max_tokens":null,"seed":null}', X'01000000', X'02000000', X'000000BF', '[]', NULL);

insert into spans (attempt_id, id, parent_id, name, kind, started_at, ended_at, ok, late, attributes) values
    ('9b42e90a198d467493b8dcf89bc42c8e', '0000000000000001', NULL, 'tool', 'tool', 1, 2, 1, 0, '{}');

insert into rewards (attempt_id, late, position, scope, target, name, value, source) values
    ('1bba7619409f4d0cb9c1e12047fdc65b', 0, 0, 'rollout', NULL, 'outcome', 0.0, 'verifier'),
    ('5b080595a8bf4e0193e4cdb7516b6e12', 0, 0, 'rollout', NULL, 'outcome', 0.0, 'verifier'),
    ('9b42e90a198d467493b8dcf89bc42c8e', 0, 0, 'rollout', NULL, 'outcome', 1.0, 'verifier');

insert into steps (run_id, step, committed, at, record) values
    ('run', 0, 1, 1700000000.0, '{"checkpoint":"step-0","epoch":1,"groups":["trained"],"metrics":{"reward":0.5},"run":"run","step":0,"versions":{"policy":1}}');

insert into metrics (run_id, step, name, value) values
    ('run', 0, 'reward', 0.5);

insert into policies (run_id, policy, version, base_url, model) values
    ('run', 'policy', 1, 'http://x/v1', 'm');

insert into events (seq, run_id, kind, id) values
    (1, 'run', 'run', 'run'),
    (2, 'other', 'run', 'other'),
    (3, 'run', 'group', 'trained'),
    (4, 'run', 'rollout', 'trained/0'),
    (5, 'run', 'attempt', '9b42e90a198d467493b8dcf89bc42c8e'),
    (6, 'run', 'attempt', '9b42e90a198d467493b8dcf89bc42c8e'),
    (7, 'run', 'attempt', '9b42e90a198d467493b8dcf89bc42c8e'),
    (8, 'run', 'attempt', '9b42e90a198d467493b8dcf89bc42c8e'),
    (9, 'run', 'rollout', 'trained/0'),
    (10, 'run', 'group', 'trained'),
    (11, 'run', 'group', 'trained'),
    (12, 'run', 'group', 'trained'),
    (13, 'run', 'step', '0'),
    (14, 'run', 'policy', 'policy'),
    (15, 'run', 'group', 'claimed'),
    (16, 'run', 'rollout', 'claimed/0'),
    (17, 'run', 'rollout', 'claimed/1'),
    (18, 'run', 'attempt', '5b080595a8bf4e0193e4cdb7516b6e12'),
    (19, 'run', 'rollout', 'claimed/0'),
    (20, 'run', 'rollout', 'claimed/1'),
    (21, 'run', 'rollout', 'claimed/2'),
    (22, 'run', 'group', 'claimed'),
    (23, 'run', 'group', 'claimed'),
    (24, 'run', 'group', 'settled'),
    (25, 'run', 'rollout', 'settled/0'),
    (26, 'run', 'rollout', 'settled/0'),
    (27, 'run', 'group', 'settled'),
    (28, 'run', 'group', 'open'),
    (29, 'run', 'rollout', 'open/0'),
    (30, 'run', 'attempt', '39be1363479741bbb8d1a840675ad36c'),
    (31, 'run', 'attempt', '39be1363479741bbb8d1a840675ad36c'),
    (32, 'run', 'rollout', 'open/0'),
    (33, 'run', 'rollout', 'open/0'),
    (34, 'run', 'attempt', '69c390ea58154aa096220c5057f8c9c3'),
    (35, 'run', 'group', 'eval'),
    (36, 'other', 'group', 'far'),
    (37, 'other', 'rollout', 'far/0'),
    (38, 'other', 'attempt', '47f444b8eca54757b892d8df2525c810');
