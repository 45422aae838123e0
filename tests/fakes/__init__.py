"""What several folders of tests use in the place of models, people and other machines: scripted, small, and real
wherever it can be.

records: every row that a buffer holds; replay_command: what is asked of it from a shell.
databases, postgres_servers: where buffers are: SQLite, and every PostgreSQL server on this machine.
batch_rows: rows of an update, and models of two layers to update.
runs: whole runs in a second, and the models they start from; processes, ranks: runs in processes of their own.
conversations, scripted: policies that say what is written down; families: three chat templates and tokenizers.
real_templates, tokenizer_kinds: every template with every kind of tokenizer; template_reference: what transformers
makes of them.
environments: files that a configuration names.
shell: the command in this process; small_processes: processes without torch; scripted_http: servers in threads.
"""
