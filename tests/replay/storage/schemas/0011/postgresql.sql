CREATE TABLE buffer_state (
    name TEXT COLLATE "C" NOT NULL,
    value BIGINT NOT NULL,
    CONSTRAINT buffer_state_pkey PRIMARY KEY (name)
);
CREATE TABLE replay_schema_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT replay_schema_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE runs (
    id TEXT COLLATE "C" NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    config TEXT COLLATE "C" NOT NULL,
    authors TEXT COLLATE "C" NOT NULL,
    authors_hash TEXT COLLATE "C" NOT NULL,
    code_version TEXT COLLATE "C" NOT NULL,
    started_at TEXT COLLATE "C" NOT NULL,
    fingerprint TEXT COLLATE "C",
    epoch BIGINT DEFAULT '0'::bigint NOT NULL,
    leader TEXT COLLATE "C",
    leader_due DOUBLE PRECISION,
    ended BOOLEAN DEFAULT false NOT NULL,
    CONSTRAINT runs_pkey PRIMARY KEY (id)
);
CREATE TABLE tasks (
    hash TEXT COLLATE "C" NOT NULL,
    environment TEXT COLLATE "C" NOT NULL,
    payload TEXT COLLATE "C" NOT NULL,
    CONSTRAINT tasks_pkey PRIMARY KEY (hash)
);
CREATE TABLE draws (
    run TEXT COLLATE "C" NOT NULL,
    iteration BIGINT NOT NULL,
    slot BIGINT NOT NULL,
    trajectory TEXT COLLATE "C" NOT NULL,
    stream TEXT COLLATE "C" NOT NULL,
    probability DOUBLE PRECISION,
    staleness BIGINT,
    state TEXT COLLATE "C" NOT NULL,
    advantage DOUBLE PRECISION,
    drift_mean DOUBLE PRECISION,
    drift_max DOUBLE PRECISION,
    ess_share DOUBLE PRECISION,
    approx_kl DOUBLE PRECISION,
    clip_fraction DOUBLE PRECISION,
    sequence BIGINT DEFAULT '0'::bigint NOT NULL,
    weight DOUBLE PRECISION,
    CONSTRAINT draws_pkey PRIMARY KEY (run, iteration, slot),
    CONSTRAINT draws_run_fkey FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE INDEX draws_by_trajectory ON draws (trajectory);
CREATE INDEX reservations_by_sequence ON draws (sequence) WHERE (state = 'reserved'::text);
CREATE TABLE engines (
    run TEXT COLLATE "C" NOT NULL,
    id TEXT COLLATE "C" NOT NULL,
    facts TEXT COLLATE "C" NOT NULL,
    started_at DOUBLE PRECISION NOT NULL,
    seen_at DOUBLE PRECISION NOT NULL,
    CONSTRAINT engines_pkey PRIMARY KEY (run, id),
    CONSTRAINT engines_run_fkey FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE TABLE groups (
    id TEXT COLLATE "C" NOT NULL,
    run TEXT COLLATE "C" NOT NULL,
    task TEXT COLLATE "C" NOT NULL,
    iteration BIGINT NOT NULL,
    size BIGINT NOT NULL,
    reward_mean DOUBLE PRECISION NOT NULL,
    reward_std DOUBLE PRECISION NOT NULL,
    success_rate DOUBLE PRECISION NOT NULL,
    CONSTRAINT groups_pkey PRIMARY KEY (id),
    CONSTRAINT groups_run_fkey FOREIGN KEY(run) REFERENCES runs (id),
    CONSTRAINT groups_task_fkey FOREIGN KEY(task) REFERENCES tasks (hash)
);
CREATE INDEX groups_by_run ON groups (run, iteration);
CREATE INDEX groups_by_task ON groups (task, run);
CREATE TABLE histograms (
    run TEXT COLLATE "C" NOT NULL,
    iteration BIGINT NOT NULL,
    quantity TEXT COLLATE "C" NOT NULL,
    stream TEXT COLLATE "C" NOT NULL,
    age TEXT COLLATE "C" NOT NULL,
    counts BYTEA NOT NULL,
    CONSTRAINT histograms_pkey PRIMARY KEY (run, iteration, quantity, stream, age),
    CONSTRAINT histograms_run_fkey FOREIGN KEY(run) REFERENCES runs (id)
);
ALTER TABLE histograms ALTER COLUMN counts SET STORAGE EXTERNAL;
CREATE TABLE iterations (
    run TEXT COLLATE "C" NOT NULL,
    iteration BIGINT NOT NULL,
    policy_version BIGINT NOT NULL,
    planned_fresh BIGINT NOT NULL,
    planned_replay BIGINT NOT NULL,
    fresh BIGINT NOT NULL,
    replay BIGINT NOT NULL,
    fraction DOUBLE PRECISION NOT NULL,
    optimizer_steps BIGINT NOT NULL,
    CONSTRAINT iterations_pkey PRIMARY KEY (run, iteration),
    CONSTRAINT iterations_run_fkey FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE TABLE metrics (
    run TEXT COLLATE "C" NOT NULL,
    iteration BIGINT NOT NULL,
    name TEXT COLLATE "C" NOT NULL,
    value DOUBLE PRECISION,
    CONSTRAINT metrics_pkey PRIMARY KEY (run, iteration, name),
    CONSTRAINT metrics_run_fkey FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE TABLE observations (
    id TEXT COLLATE "C" NOT NULL,
    task TEXT COLLATE "C" NOT NULL,
    environment TEXT COLLATE "C" NOT NULL,
    parent TEXT COLLATE "C",
    tool TEXT COLLATE "C" NOT NULL,
    arguments TEXT COLLATE "C" NOT NULL,
    content TEXT COLLATE "C" NOT NULL,
    checksum TEXT COLLATE "C" NOT NULL,
    CONSTRAINT observations_pkey PRIMARY KEY (id),
    CONSTRAINT observations_task_fkey FOREIGN KEY(task) REFERENCES tasks (hash)
);
CREATE INDEX observations_by_task ON observations (task);
CREATE TABLE planned_batches (
    run TEXT COLLATE "C" NOT NULL,
    iteration BIGINT NOT NULL,
    plan TEXT COLLATE "C" NOT NULL,
    CONSTRAINT planned_batches_pkey PRIMARY KEY (run, iteration),
    CONSTRAINT planned_batches_run_fkey FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE TABLE policies (
    run TEXT COLLATE "C" NOT NULL,
    version BIGINT NOT NULL,
    checkpoint TEXT COLLATE "C",
    tokenizer_hash TEXT COLLATE "C" NOT NULL,
    template_hash TEXT COLLATE "C" NOT NULL,
    created_at TEXT COLLATE "C" NOT NULL,
    sha256 TEXT COLLATE "C",
    probe TEXT COLLATE "C",
    CONSTRAINT policies_pkey PRIMARY KEY (run, version),
    CONSTRAINT policies_run_fkey FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE TABLE sampler_state (
    run TEXT COLLATE "C" NOT NULL,
    iteration BIGINT NOT NULL,
    state TEXT COLLATE "C" NOT NULL,
    CONSTRAINT sampler_state_pkey PRIMARY KEY (run, iteration),
    CONSTRAINT sampler_state_run_fkey FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE TABLE tickets (
    run TEXT COLLATE "C" NOT NULL,
    number BIGINT NOT NULL,
    member BIGINT NOT NULL,
    task TEXT COLLATE "C" NOT NULL,
    iteration BIGINT NOT NULL,
    purpose TEXT COLLATE "C" NOT NULL,
    state TEXT COLLATE "C" NOT NULL,
    holder TEXT COLLATE "C",
    fence BIGINT DEFAULT '0'::bigint NOT NULL,
    due DOUBLE PRECISION,
    tries BIGINT DEFAULT '0'::bigint NOT NULL,
    reason TEXT COLLATE "C",
    trajectory TEXT COLLATE "C",
    outcome TEXT COLLATE "C",
    issued_at DOUBLE PRECISION NOT NULL,
    ended_at DOUBLE PRECISION,
    closed_at BIGINT,
    late_at BIGINT,
    CONSTRAINT tickets_pkey PRIMARY KEY (run, number, member),
    CONSTRAINT tickets_run_fkey FOREIGN KEY(run) REFERENCES runs (id),
    CONSTRAINT tickets_task_fkey FOREIGN KEY(task) REFERENCES tasks (hash)
);
CREATE UNIQUE INDEX tickets_by_trajectory ON tickets (trajectory);
CREATE INDEX unclosed_tickets ON tickets (run, purpose, number, member) WHERE (closed_at IS NULL);
CREATE TABLE workers (
    run TEXT COLLATE "C" NOT NULL,
    id TEXT COLLATE "C" NOT NULL,
    facts TEXT COLLATE "C" NOT NULL,
    started_at DOUBLE PRECISION NOT NULL,
    seen_at DOUBLE PRECISION NOT NULL,
    CONSTRAINT workers_pkey PRIMARY KEY (run, id),
    CONSTRAINT workers_run_fkey FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE TABLE reclaimed (
    id TEXT COLLATE "C" NOT NULL,
    group_id TEXT COLLATE "C" NOT NULL,
    slot BIGINT NOT NULL,
    member BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    source TEXT COLLATE "C" NOT NULL,
    reward DOUBLE PRECISION NOT NULL,
    success BOOLEAN NOT NULL,
    advantage DOUBLE PRECISION NOT NULL,
    num_action_tokens BIGINT NOT NULL,
    policy_version_min BIGINT NOT NULL,
    parent TEXT COLLATE "C",
    state_reason TEXT COLLATE "C" NOT NULL,
    changed BIGINT NOT NULL,
    CONSTRAINT reclaimed_pkey PRIMARY KEY (id),
    CONSTRAINT reclaimed_group_id_fkey FOREIGN KEY(group_id) REFERENCES groups (id)
);
CREATE INDEX reclaimed_by_change ON reclaimed (changed);
CREATE TABLE trajectories (
    id TEXT COLLATE "C" NOT NULL,
    run TEXT COLLATE "C" NOT NULL,
    group_id TEXT COLLATE "C" NOT NULL,
    task TEXT COLLATE "C" NOT NULL,
    iteration BIGINT NOT NULL,
    slot BIGINT NOT NULL,
    member BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    source TEXT COLLATE "C" NOT NULL,
    reward DOUBLE PRECISION NOT NULL,
    success BOOLEAN NOT NULL,
    advantage DOUBLE PRECISION NOT NULL,
    stop_reason TEXT COLLATE "C" NOT NULL,
    error_kind TEXT COLLATE "C",
    num_turns BIGINT NOT NULL,
    num_tool_calls BIGINT NOT NULL,
    num_tokens BIGINT NOT NULL,
    num_action_tokens BIGINT NOT NULL,
    policy_version_min BIGINT NOT NULL,
    policy_version_max BIGINT NOT NULL,
    temperature DOUBLE PRECISION NOT NULL,
    top_p DOUBLE PRECISION NOT NULL,
    top_k BIGINT NOT NULL,
    logprobs_mode TEXT COLLATE "C" NOT NULL,
    mean_entropy DOUBLE PRECISION,
    mean_behavior_log_prob DOUBLE PRECISION,
    min_behavior_log_prob DOUBLE PRECISION,
    environment TEXT COLLATE "C" NOT NULL,
    environment_version TEXT COLLATE "C" NOT NULL,
    content_hash TEXT COLLATE "C" NOT NULL,
    parent TEXT COLLATE "C",
    state TEXT COLLATE "C" NOT NULL,
    state_reason TEXT COLLATE "C",
    created_at TEXT COLLATE "C" NOT NULL,
    changed BIGINT DEFAULT '1'::bigint NOT NULL,
    token_hash TEXT COLLATE "C",
    num_bytes BIGINT,
    record_checksum BIGINT,
    uses BIGINT DEFAULT '0'::bigint NOT NULL,
    num_messages BIGINT,
    segments_checksum BIGINT,
    CONSTRAINT trajectories_pkey PRIMARY KEY (id),
    CONSTRAINT trajectories_group_id_fkey FOREIGN KEY(group_id) REFERENCES groups (id),
    CONSTRAINT trajectories_run_fkey FOREIGN KEY(run) REFERENCES runs (id),
    CONSTRAINT trajectories_task_fkey FOREIGN KEY(task) REFERENCES tasks (hash)
);
CREATE INDEX imports_by_change ON trajectories (changed) WHERE ((source <> 'self'::text) AND (source <> 'gateway'::text) AND (source <> 'hindsight'::text));
CREATE INDEX trajectories_by_change ON trajectories (run, changed);
CREATE INDEX trajectories_by_group ON trajectories (group_id);
CREATE INDEX trajectories_by_parent ON trajectories (parent) WHERE (parent IS NOT NULL);
CREATE INDEX trajectories_by_run ON trajectories (run, iteration, slot, id);
CREATE INDEX trajectories_by_state ON trajectories (state);
CREATE INDEX trajectories_by_task ON trajectories (task);
CREATE INDEX trajectories_by_token_hash ON trajectories (token_hash);
CREATE TABLE messages (
    trajectory TEXT COLLATE "C" NOT NULL,
    num_messages BIGINT NOT NULL,
    said TEXT COLLATE "C" NOT NULL,
    checksum BIGINT NOT NULL,
    CONSTRAINT messages_pkey PRIMARY KEY (trajectory),
    CONSTRAINT messages_trajectory_fkey1 FOREIGN KEY(trajectory) REFERENCES trajectories (id)
);
CREATE TABLE segments (
    trajectory TEXT COLLATE "C" NOT NULL,
    position BIGINT NOT NULL,
    reason TEXT COLLATE "C" NOT NULL,
    behavior_context TEXT COLLATE "C" NOT NULL,
    num_tokens BIGINT NOT NULL,
    tokens BYTEA NOT NULL,
    CONSTRAINT segments_pkey PRIMARY KEY (trajectory, position),
    CONSTRAINT segments_trajectory_fkey1 FOREIGN KEY(trajectory) REFERENCES trajectories (id)
);
ALTER TABLE segments ALTER COLUMN tokens SET STORAGE EXTERNAL;
CREATE TABLE token_scores (
    trajectory TEXT COLLATE "C" NOT NULL,
    position BIGINT NOT NULL,
    run TEXT COLLATE "C" NOT NULL,
    policy_version BIGINT NOT NULL,
    log_probs BYTEA NOT NULL,
    CONSTRAINT token_scores_pkey PRIMARY KEY (trajectory, position),
    CONSTRAINT token_scores_run_fkey FOREIGN KEY(run) REFERENCES runs (id),
    CONSTRAINT token_scores_trajectory_fkey FOREIGN KEY(trajectory) REFERENCES trajectories (id)
);
ALTER TABLE token_scores ALTER COLUMN log_probs SET STORAGE EXTERNAL;
