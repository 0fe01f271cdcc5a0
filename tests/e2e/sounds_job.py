"""A process whose vLLM listens to tones: `python sounds_job.py <in> <out>`.

The input is JSON: a job as of `ec_s3.connector.offline`, a prompt, and tones as pairs of hertz and
seconds, each asked about in a batch of its own. They are handed over as waves: what would decode a
file is not installed. The output lists tokens and encoded items of each batch.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(task: dict[str, Any]) -> list[dict[str, Any]]:
    from ec_s3.connector import encode_log
    from ec_s3.connector.offline import Job, OfflineEngine
    from ec_s3.testing.tiny_sound_models import SAMPLE_RATE, tone

    with (
        tempfile.TemporaryDirectory() as workdir,
        encode_log.installed(Path(workdir)) as log,
    ):
        engine = OfflineEngine(Job.parse(json.dumps(task["job"])), log)
        llm: Any = engine._llm
        answers = []
        for hertz, seconds in task["tones"]:
            sound = tone(hertz=hertz, seconds=seconds), SAMPLE_RATE
            prompt = {"prompt": task["prompt"], "multi_modal_data": {"audio": sound}}
            (output,) = llm.generate([prompt], engine._sampling, use_tqdm=False)
            encoded = sum(len(call.rows) for call in log.drain())
            answers.append({"tokens": list(output.outputs[0].token_ids), "encoded": encoded})
        engine.close()
    return answers


if __name__ == "__main__":
    found = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(found))
