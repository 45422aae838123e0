BEGIN TRANSACTION;
CREATE TABLE draws (
	run TEXT NOT NULL, 
	iteration BIGINT NOT NULL, 
	slot BIGINT NOT NULL, 
	trajectory TEXT NOT NULL, 
	stream TEXT NOT NULL, 
	probability DOUBLE, 
	staleness BIGINT, 
	state TEXT NOT NULL, 
	advantage DOUBLE, 
	drift_mean DOUBLE, 
	drift_max DOUBLE, 
	ess_share DOUBLE, 
	approx_kl DOUBLE, 
	clip_fraction DOUBLE, 
	PRIMARY KEY (run, iteration, slot), 
	FOREIGN KEY(run) REFERENCES runs (id), 
	FOREIGN KEY(trajectory) REFERENCES trajectories (id)
);
INSERT INTO "draws" VALUES('run-1',3,8,'25314-run-1-2-0-0-2','replay',0.2,1,'reserved',NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "draws" VALUES('run-1',3,9,'17395-run-1-2-0-0-1','replay',0.2,1,'reserved',NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE groups (
	id TEXT NOT NULL, 
	run TEXT NOT NULL, 
	task TEXT NOT NULL, 
	iteration BIGINT NOT NULL, 
	size BIGINT NOT NULL, 
	reward_mean DOUBLE NOT NULL, 
	reward_std DOUBLE NOT NULL, 
	success_rate DOUBLE NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(run) REFERENCES runs (id), 
	FOREIGN KEY(task) REFERENCES tasks (hash)
);
INSERT INTO "groups" VALUES('group-1','run-1','task-1',1,2,0.5,0.5,0.5);
INSERT INTO "groups" VALUES('run-1-2-0-0','run-1','task-1',2,4,0.5,0.5,0.5);
CREATE TABLE iterations (
	run TEXT NOT NULL, 
	iteration BIGINT NOT NULL, 
	policy_version BIGINT NOT NULL, 
	planned_fresh BIGINT NOT NULL, 
	planned_replay BIGINT NOT NULL, 
	fresh BIGINT NOT NULL, 
	replay BIGINT NOT NULL, 
	fraction DOUBLE NOT NULL, 
	optimizer_steps BIGINT NOT NULL, 
	PRIMARY KEY (run, iteration), 
	FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE TABLE messages (
	trajectory TEXT NOT NULL, 
	position BIGINT NOT NULL, 
	author TEXT NOT NULL, 
	role TEXT NOT NULL, 
	content TEXT NOT NULL, 
	tool_calls TEXT, 
	name TEXT, 
	tool_call_id TEXT, reasoning TEXT, 
	PRIMARY KEY (trajectory, position), 
	FOREIGN KEY(trajectory) REFERENCES trajectories (id)
);
INSERT INTO "messages" VALUES('a',0,'initialization','system','You look things up.',NULL,NULL,NULL,NULL);
INSERT INTO "messages" VALUES('a',1,'user','user','Where is the key?',NULL,NULL,NULL,NULL);
INSERT INTO "messages" VALUES('a',2,'llm','assistant','','[{"name":"lookup","arguments":{"key":"k1"},"id":"call-0"}]',NULL,NULL,'k1');
INSERT INTO "messages" VALUES('a',3,'env','tool','json:"line one\nNUL \u0000, half \ud83d, mark \ue000json:x"',NULL,'lookup','call-0',NULL);
INSERT INTO "messages" VALUES('a',4,'llm','assistant','in the drawer',NULL,NULL,NULL,NULL);
INSERT INTO "messages" VALUES('09476-run-1-2-0-0-0',0,'initialization','system','You look things up.',NULL,NULL,NULL,NULL);
INSERT INTO "messages" VALUES('09476-run-1-2-0-0-0',1,'user','user','Where is the key?',NULL,NULL,NULL,NULL);
INSERT INTO "messages" VALUES('09476-run-1-2-0-0-0',2,'llm','assistant','','[{"name":"lookup","arguments":{"key":"k1"},"id":"call-0"}]',NULL,NULL,'k1');
INSERT INTO "messages" VALUES('09476-run-1-2-0-0-0',3,'env','tool','json:"line one\nNUL \u0000, half \ud83d, mark \ue000json:x"',NULL,'lookup','call-0',NULL);
INSERT INTO "messages" VALUES('09476-run-1-2-0-0-0',4,'llm','assistant','in the drawer',NULL,NULL,NULL,NULL);
INSERT INTO "messages" VALUES('17395-run-1-2-0-0-1',0,'initialization','system','You look things up.',NULL,NULL,NULL,NULL);
INSERT INTO "messages" VALUES('17395-run-1-2-0-0-1',1,'user','user','Where is the key?',NULL,NULL,NULL,NULL);
INSERT INTO "messages" VALUES('17395-run-1-2-0-0-1',2,'llm','assistant','','[{"name":"lookup","arguments":{"key":"k1"},"id":"call-0"}]',NULL,NULL,'k1');
INSERT INTO "messages" VALUES('17395-run-1-2-0-0-1',3,'env','tool','json:"line one\nNUL \u0000, half \ud83d, mark \ue000json:x"',NULL,'lookup','call-0',NULL);
INSERT INTO "messages" VALUES('17395-run-1-2-0-0-1',4,'llm','assistant','in the drawer',NULL,NULL,NULL,NULL);
INSERT INTO "messages" VALUES('25314-run-1-2-0-0-2',0,'initialization','system','You look things up.',NULL,NULL,NULL,NULL);
INSERT INTO "messages" VALUES('25314-run-1-2-0-0-2',1,'user','user','Where is the key?',NULL,NULL,NULL,NULL);
INSERT INTO "messages" VALUES('25314-run-1-2-0-0-2',2,'llm','assistant','','[{"name":"lookup","arguments":{"key":"k1"},"id":"call-0"}]',NULL,NULL,'k1');
INSERT INTO "messages" VALUES('25314-run-1-2-0-0-2',3,'env','tool','json:"line one\nNUL \u0000, half \ud83d, mark \ue000json:x"',NULL,'lookup','call-0',NULL);
INSERT INTO "messages" VALUES('25314-run-1-2-0-0-2',4,'llm','assistant','in the drawer',NULL,NULL,NULL,NULL);
INSERT INTO "messages" VALUES('33233-run-1-2-0-0-3',0,'initialization','system','You look things up.',NULL,NULL,NULL,NULL);
INSERT INTO "messages" VALUES('33233-run-1-2-0-0-3',1,'user','user','Where is the key?',NULL,NULL,NULL,NULL);
INSERT INTO "messages" VALUES('33233-run-1-2-0-0-3',2,'llm','assistant','','[{"name":"lookup","arguments":{"key":"k1"},"id":"call-0"}]',NULL,NULL,'k1');
INSERT INTO "messages" VALUES('33233-run-1-2-0-0-3',3,'env','tool','json:"line one\nNUL \u0000, half \ud83d, mark \ue000json:x"',NULL,'lookup','call-0',NULL);
INSERT INTO "messages" VALUES('33233-run-1-2-0-0-3',4,'llm','assistant','in the drawer',NULL,NULL,NULL,NULL);
CREATE TABLE metrics (
	run TEXT NOT NULL, 
	iteration BIGINT NOT NULL, 
	name TEXT NOT NULL, 
	value DOUBLE, 
	PRIMARY KEY (run, iteration, name), 
	FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE TABLE policies (
	run TEXT NOT NULL, 
	version BIGINT NOT NULL, 
	checkpoint TEXT, 
	tokenizer_hash TEXT NOT NULL, 
	template_hash TEXT NOT NULL, 
	created_at TEXT NOT NULL, 
	PRIMARY KEY (run, version), 
	FOREIGN KEY(run) REFERENCES runs (id)
);
INSERT INTO "policies" VALUES('run-1',0,NULL,'tok','tpl','2026-11-21T14:18:20+00:00');
CREATE TABLE replay_schema_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT replay_schema_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "replay_schema_version" VALUES('0002');
CREATE TABLE runs (
	id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	config TEXT NOT NULL, 
	authors TEXT NOT NULL, 
	authors_hash TEXT NOT NULL, 
	code_version TEXT NOT NULL, 
	started_at TEXT NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "runs" VALUES('run-1','quickstart-001','{"run": {"seed": 0}}','[{"name":"initialization","action":false,"trained":false,"shown":true,"behavior":false},{"name":"user","action":false,"trained":false,"shown":true,"behavior":false},{"name":"env","action":false,"trained":false,"shown":true,"behavior":false},{"name":"memory","action":false,"trained":false,"shown":true,"behavior":false},{"name":"llm","action":true,"trained":true,"shown":true,"behavior":true},{"name":"llm(do_not_train)","action":true,"trained":false,"shown":true,"behavior":true},{"name":"template","action":false,"trained":false,"shown":true,"behavior":false},{"name":"demonstration","action":true,"trained":true,"shown":true,"behavior":false},{"name":"history","action":false,"trained":false,"shown":true,"behavior":false}]','7d47bf94b3882facf465d216c4b100aba7f77b963d034177d5da10a65d3be346','0.1.0','2026-11-21T14:18:20+00:00');
CREATE TABLE sampler_state (
	run TEXT NOT NULL, 
	iteration BIGINT NOT NULL, 
	state TEXT NOT NULL, 
	PRIMARY KEY (run, iteration), 
	FOREIGN KEY(run) REFERENCES runs (id)
);
CREATE TABLE segments (
	trajectory TEXT NOT NULL, 
	position BIGINT NOT NULL, 
	reason TEXT NOT NULL, 
	num_tokens BIGINT NOT NULL, 
	token_ids BLOB NOT NULL, 
	authors BLOB NOT NULL, 
	behavior_log_probs BLOB NOT NULL, 
	policy_versions BLOB NOT NULL, behavior_context TEXT DEFAULT 'plain' NOT NULL, 
	PRIMARY KEY (trajectory, position), 
	FOREIGN KEY(trajectory) REFERENCES trajectories (id)
);
INSERT INTO "segments" VALUES('a',0,'clean',6,X'414C01010600000028B52FFD2418C1000005000000060000000700000008000000090000000A000000D3313CB7',X'414C02010600000028B52FFD2406310000060104040204007EF7F8',X'414C03010600000028B52FFD2418C100000000C07F0000C07F000000BF000080BF0000C07F0000C0BF11A6F3B0',X'414C04010600000028B52FFD24189D000058FFFF00FFFFFFFF000000000200208B0160010E9E97C0','plain');
INSERT INTO "segments" VALUES('09476-run-1-2-0-0-0',0,'clean',6,X'414C01010600000028B52FFD2418C1000005000000060000000700000008000000090000000A000000D3313CB7',X'414C02010600000028B52FFD2406310000060104040204007EF7F8',X'414C03010600000028B52FFD2418C100000000C07F0000C07F000000BF000080BF0000C07F0000C0BF11A6F3B0',X'414C04010600000028B52FFD2418C10000FFFFFFFFFFFFFFFF0100000001000000FFFFFFFF01000000DD70EE3E','plain');
INSERT INTO "segments" VALUES('17395-run-1-2-0-0-1',0,'clean',6,X'414C01010600000028B52FFD2418C1000005000000060000000700000008000000090000000A000000D3313CB7',X'414C02010600000028B52FFD2406310000060104040204007EF7F8',X'414C03010600000028B52FFD2418C100000000C07F0000C07F000000BF000080BF0000C07F0000C0BF11A6F3B0',X'414C04010600000028B52FFD2418C10000FFFFFFFFFFFFFFFF0100000001000000FFFFFFFF01000000DD70EE3E','plain');
INSERT INTO "segments" VALUES('25314-run-1-2-0-0-2',0,'clean',6,X'414C01010600000028B52FFD2418C1000005000000060000000700000008000000090000000A000000D3313CB7',X'414C02010600000028B52FFD2406310000060104040204007EF7F8',X'414C03010600000028B52FFD2418C100000000C07F0000C07F000000BF000080BF0000C07F0000C0BF11A6F3B0',X'414C04010600000028B52FFD2418C10000FFFFFFFFFFFFFFFF0100000001000000FFFFFFFF01000000DD70EE3E','plain');
INSERT INTO "segments" VALUES('33233-run-1-2-0-0-3',0,'clean',6,X'414C01010600000028B52FFD2418C1000005000000060000000700000008000000090000000A000000D3313CB7',X'414C02010600000028B52FFD2406310000060104040204007EF7F8',X'414C03010600000028B52FFD2418C100000000C07F0000C07F000000BF000080BF0000C07F0000C0BF11A6F3B0',X'414C04010600000028B52FFD2418C10000FFFFFFFFFFFFFFFF0100000001000000FFFFFFFF01000000DD70EE3E','plain');
CREATE TABLE tasks (
	hash TEXT NOT NULL, 
	environment TEXT NOT NULL, 
	payload TEXT NOT NULL, 
	PRIMARY KEY (hash)
);
INSERT INTO "tasks" VALUES('task-1','lookup_chain','{"hops":2,"store":{"k1":"drawer"}}');
CREATE TABLE trajectories (
	id TEXT NOT NULL, 
	run TEXT NOT NULL, 
	group_id TEXT NOT NULL, 
	task TEXT NOT NULL, 
	iteration BIGINT NOT NULL, 
	slot BIGINT NOT NULL, 
	member BIGINT NOT NULL, 
	attempt BIGINT NOT NULL, 
	source TEXT NOT NULL, 
	reward DOUBLE NOT NULL, 
	success BOOLEAN NOT NULL, 
	advantage DOUBLE NOT NULL, 
	stop_reason TEXT NOT NULL, 
	error_kind TEXT, 
	num_turns BIGINT NOT NULL, 
	num_tool_calls BIGINT NOT NULL, 
	num_tokens BIGINT NOT NULL, 
	num_action_tokens BIGINT NOT NULL, 
	policy_version_min BIGINT NOT NULL, 
	policy_version_max BIGINT NOT NULL, 
	temperature DOUBLE NOT NULL, 
	top_p DOUBLE NOT NULL, 
	top_k BIGINT NOT NULL, 
	logprobs_mode TEXT NOT NULL, 
	mean_entropy DOUBLE, 
	mean_behavior_log_prob DOUBLE, 
	min_behavior_log_prob DOUBLE, 
	environment TEXT NOT NULL, 
	environment_version TEXT NOT NULL, 
	content_hash TEXT NOT NULL, 
	parent TEXT, 
	state TEXT NOT NULL, 
	state_reason TEXT, 
	created_at TEXT NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(run) REFERENCES runs (id), 
	FOREIGN KEY(group_id) REFERENCES groups (id), 
	FOREIGN KEY(task) REFERENCES tasks (hash)
);
INSERT INTO "trajectories" VALUES('a','run-1','group-1','task-1',1,0,0,0,'self',1.0,1,0.5,'final',NULL,2,1,6,3,0,0,1.0,1.0,0,'full',0.25,-1.0,-1.5,'lookup_chain','1','419ea9042d88e70ae9a509a3971ad7ef60d7a97feb786d7939108a04448bd1f2',NULL,'eligible',NULL,'2026-11-21T14:18:20+00:00');
INSERT INTO "trajectories" VALUES('09476-run-1-2-0-0-0','run-1','run-1-2-0-0','task-1',2,0,0,0,'self',1.0,1,0.5,'final',NULL,2,1,6,3,1,1,1.0,1.0,0,'full',0.25,-1.0,-1.5,'lookup_chain','1','c6186ee060a82905846624a8a3775f3c84e70d810aec393dcbe0dfd4c1125473',NULL,'eligible',NULL,'2026-11-21T14:18:20+00:00');
INSERT INTO "trajectories" VALUES('17395-run-1-2-0-0-1','run-1','run-1-2-0-0','task-1',2,1,1,0,'self',1.0,1,0.5,'final',NULL,2,1,6,3,1,1,1.0,1.0,0,'full',0.25,-1.0,-1.5,'lookup_chain','1','c6186ee060a82905846624a8a3775f3c84e70d810aec393dcbe0dfd4c1125473',NULL,'eligible',NULL,'2026-11-21T14:18:20+00:00');
INSERT INTO "trajectories" VALUES('25314-run-1-2-0-0-2','run-1','run-1-2-0-0','task-1',2,2,2,0,'self',0.0,0,0.5,'final',NULL,2,1,6,3,1,1,1.0,1.0,0,'full',0.25,-1.0,-1.5,'lookup_chain','1','c6186ee060a82905846624a8a3775f3c84e70d810aec393dcbe0dfd4c1125473',NULL,'eligible',NULL,'2026-11-21T14:18:20+00:00');
INSERT INTO "trajectories" VALUES('33233-run-1-2-0-0-3','run-1','run-1-2-0-0','task-1',2,3,3,0,'self',0.0,0,0.5,'final',NULL,2,1,6,3,1,1,1.0,1.0,0,'full',0.25,-1.0,-1.5,'lookup_chain','1','c6186ee060a82905846624a8a3775f3c84e70d810aec393dcbe0dfd4c1125473',NULL,'eligible',NULL,'2026-11-21T14:18:20+00:00');
CREATE INDEX trajectories_by_group ON trajectories (group_id);
CREATE INDEX trajectories_by_run ON trajectories (run, iteration, slot);
CREATE INDEX trajectories_by_state ON trajectories (state, iteration, slot, run, id, group_id, success);
CREATE INDEX trajectories_by_task ON trajectories (task);
CREATE INDEX draws_by_trajectory ON draws (trajectory);
COMMIT;
