# What `import agent_rl` exports, by area: type checkers read this file, and so does __init__.py.
# isort: off
from .version import __version__ as __version__

# environments
from .gym.env import Env as Env, ToolEnv as ToolEnv, Script as Script
from .gym.sandboxed import SandboxedEnv as SandboxedEnv
from .gym.dialogue import DialogueEnv as DialogueEnv, ScriptedUser as ScriptedUser
from .gym.user import User as User
from .gym.game import Game as Game
from .policy.user import ModelUser as ModelUser
from .gym.budget import Budget as Budget
from .gym.registry import register as register, make as make, spec as spec, EnvSpec as EnvSpec
from .gym.registry import env_ids as env_ids, load_file as load_file
from .gym.from_gym import from_gym as from_gym, GymnasiumEnv as GymnasiumEnv
from .envs.adapters.games import from_gem as from_gem, from_textarena as from_textarena
from .envs.adapters.openenv import from_openenv as from_openenv
from .envs.adapters.verifiers import from_verifiers as from_verifiers
from .envs.adapters.harbor import from_harbor as from_harbor
from .envs.adapters.swe import from_swe as from_swe
from .rollout.as_trl import as_trl as as_trl
from .api import check as check
from .checks.report import CheckReport as CheckReport, Finding as Finding

# what an environment declares
from .gym.tool import tool as tool, Tool as Tool, ToolSpec as ToolSpec
from .gym.reward import reward as reward, group_reward as group_reward
from .judge.reward import judge as judge, use_judge as use_judge

# nouns
from .core.images import Image as Image
from .core.messages import Message as Message, ToolCall as ToolCall, Step as Step, Task as Task, JSON as JSON
from .core.messages import Observation as Observation
from .core.episode import Episode as Episode, EpisodeGroup as EpisodeGroup, Origin as Origin, Reward as Reward
from .core.episode import Failure as Failure, Outcome as Outcome, StopReason as StopReason
from .core.usage import Usage as Usage
from .core.judgement import Judgement as Judgement, JudgeFault as JudgeFault, Verdict as Verdict
from .judge.rubric import Criterion as Criterion, Rubric as Rubric, Rule as Rule
from .judge.files import load_rubric as load_rubric
from .core.trajectory import Trajectory as Trajectory, Span as Span, Source as Source, Fork as Fork
from .core.trajectory import Completion as Completion, FinishReason as FinishReason

# running and training
from .api import run as run, evaluate as evaluate, train as train, load as load
from .backends.run import Run as Run
from .rollout import Evaluation as Evaluation, Job as Job, run_jobs as run_jobs
from .policy import Policy as Policy, AnyPolicy as AnyPolicy, TokenPolicy as TokenPolicy
from .policy.openai import OpenAIPolicy as OpenAIPolicy
from .policy import oracle as oracle, demonstrator as demonstrator
from .engines.base import SamplingParams as SamplingParams
from .rendering import load_renderer as load_renderer, train_tokenizer as train_tokenizer

# stored episodes
from .store.episodes import read_episodes as read_episodes, EpisodeWriter as EpisodeWriter
from .replay.verify import verify as verify
from .runs.fork import fork as fork
from .formats.writing import export_episodes as export_episodes
from .formats.reading import import_episodes as import_episodes
from .judge.offline import judge_episodes as judge_episodes
from .judge.judged import load_judged as load_judged, Judged as Judged

# parts of one's own
from .algorithms.components import advantage as advantage, objective as objective
from .algorithms.components import shaping as shaping, filter as filter
from .policy.by_name import register_policy as register_policy
from .rendering.by_name import register_renderer as register_renderer
from .sandboxes.registry import register_sandbox as register_sandbox

# errors
from .errors import AgentRLError as AgentRLError, ConfigError as ConfigError, RegistryError as RegistryError
from .errors import UnknownEnvError as UnknownEnvError, NameCollisionError as NameCollisionError
from .errors import DefinitionError as DefinitionError, TrajectoryError as TrajectoryError
from .errors import RenderError as RenderError, StoreError as StoreError, DamagedEpisodeError as DamagedEpisodeError
from .errors import CheckpointError as CheckpointError, InfrastructureError as InfrastructureError
from .errors import PolicyError as PolicyError, SandboxError as SandboxError, UserError as UserError
from .errors import ToolServerError as ToolServerError, RemoteError as RemoteError, ReplayError as ReplayError
from .runs.stop import Interrupted as Interrupted
