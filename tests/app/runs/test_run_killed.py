"""A run that is killed at any moment loses no step that was saved."""

import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from command_line import HANGS_AFTER, environment

# Runs in its own interpreter. Each round forks a process that opens the run, resumes and saves,
# and dies by SIGKILL: just before its n-th call that changes the disk, for every n there is (which
# covers all states the disk can be in), or at a random time after a save.
KILLED_WRITER = textwrap.dedent("""
    import os, random, signal, sys, time, traceback
    from pathlib import Path
    from anywidth.app.runs.run import Run
    from checkpointed_runs import Settings, tensors_at

    def count_down(calls):
        def dies(call):
            def wrapped(*arguments, **options):
                nonlocal calls
                if calls == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls -= 1
                return call(*arguments, **options)
            return wrapped
        for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir"):
            setattr(os, name, dies(getattr(os, name)))

    def write(folder, report, last):
        run = Run.open(folder, writing=True)
        checkpoint = run.load_checkpoint()
        step = checkpoint.step if checkpoint else 0
        while step < last:
            step += 1
            run.save_checkpoint(step, tensors_at(step), {"epoch": step // 10})
            os.write(report, step.to_bytes(4, "little"))
        run.save_final(tensors_at(step), {"epoch": step // 10})
        os._exit(0)

    def round(folder, last, calls=None, seconds=None):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            if calls is not None:
                count_down(calls)
            try:
                write(folder, writing, last)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(writing)
        reports = b""
        if seconds is not None:
            reports = os.read(reading, 4)
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or status == 0, "the writer failed"
        while part := os.read(reading, 4096):
            reports += part
        os.close(reading)
        saved = int.from_bytes(reports[-4:], "little")
        run = Run.open(folder)
        checkpoint = run.load_checkpoint()
        step = checkpoint.step if checkpoint else 0
        assert step >= saved, f"step {saved} was saved, {step} was found"
        if checkpoint:
            for part, expected in tensors_at(step).items():
                for name, tensor in expected.items():
                    assert checkpoint.tensors[part][name].equal(tensor), (part, name)
        if run.finished:
            assert run.model_tensors()["steps"] == last
        return os.WIFSIGNALED(status), step

    root = Path(sys.argv[1])
    calls, killed = 0, True
    while killed:
        folder = root / f"calls-{calls}"
        Run.create(folder, Settings())
        killed, step = round(folder, last=3, calls=calls)
        assert not round(folder, last=4)[0]
        assert not [path for path in folder.rglob("*.tmp")]
        calls += 1
    Run.create(root / "random", Settings())
    rounds = random.Random(0)
    for _ in range(12):
        _, step = round(root / "random", last=10**6, seconds=rounds.uniform(0, 0.05))
    print("killed before", calls - 1, "calls; at random times up to step", step)
""")


def test_a_kill_at_any_moment_costs_at_most_the_steps_since_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    # A kill loses nothing that the system has been given, so a file system in memory is as good.
    memory = Path("/dev/shm")
    root = tempfile.mkdtemp(dir=memory) if memory.is_dir() else str(tmp_path)
    command = [sys.executable, "-W", "error", "-c", KILLED_WRITER, root]
    result = subprocess.run(
        command,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER,
        check=False,
    )
    shutil.rmtree(root)
    assert result.returncode == 0, result.stderr
    assert "damaged" not in result.stderr
    words = result.stdout.split()
    assert int(words[2]) > 40, result.stdout
    assert int(words[-1]) >= 12, result.stdout
