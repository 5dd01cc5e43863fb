"""MLflow: a run of an experiment, on whatever tracking server or folder."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any, Final

from disttrain.errors import SettingError
from disttrain.trackers.tracker import Numbers, check_installed

_NOT_IN_NAMES: Final = re.compile(r"[^\w\-. /]")
_MAX_PARAM: Final = 500
"""Letters of a parameter's value that all of MLflow's stores take."""


class MLflow:
    """Logs numbers as metrics of a run in `experiment`. `tracking_uri`: as MLflow has it; None: what its environment
    says. mlflow-skinny is enough. Raises SettingError where neither is installed."""

    name = "mlflow"

    def __init__(
        self, experiment: str = "Default", *, run_name: str | None = None, tracking_uri: str | None = None
    ) -> None:
        check_installed("MLflow", "mlflow", "mlflow-skinny")
        self._experiment, self._run_name, self._tracking_uri = experiment, run_name, tracking_uri
        self._client: Any = None
        self._run_id = ""

    def open(self, run_id: str | None, first_step: int, config: Mapping[str, Any]) -> str:
        """See `Tracker`. A client of its own: nothing of the script's own use of mlflow changes."""
        mlflow = importlib.import_module("mlflow")  # here: it takes seconds to load, and one rank writes
        self._metric = mlflow.entities.Metric
        try:
            self._client = client = mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        except Exception as error:
            if "MLFLOW_ALLOW_FILE_STORE" not in str(error) and not isinstance(error, ImportError):
                raise
            problem = f"it lacks a package ({error})" if isinstance(error, ImportError) else "it writes to no folders"
            uri = self._tracking_uri or mlflow.get_tracking_uri()
            raise SettingError(
                "MLflow",
                f"{problem}, and tracking_uri is {uri}.",
                "Give tracking_uri of a server, or of a database as sqlite:///mlflow.db, for which mlflow is needed in "
                "place of mlflow-skinny. For folders set MLFLOW_ALLOW_FILE_STORE=true.",
            ) from error
        if run_id is None:
            experiment = client.get_experiment_by_name(self._experiment)
            experiment_id = (
                client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id
            )
            run_id = str(client.create_run(experiment_id, run_name=self._run_name).info.run_id)
            for name, value in config.items():
                client.log_param(run_id, _as_name(name), str(value)[:_MAX_PARAM])
        else:
            client.update_run(run_id, status="RUNNING")
        self._run_id = run_id
        return run_id

    def log(self, numbers: Numbers, step: int, time_s: float) -> None:
        """See `Tracker`."""
        metrics = [self._metric(_as_name(name), value, round(time_s * 1e3), step) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def flush(self) -> None:
        """MLflow has got it."""

    def close(self) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self._run_id)


def _as_name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)
