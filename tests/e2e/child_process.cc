#include "tests/e2e/child_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>
#include <string_view>

namespace tessera::e2e {

ChildProcess::ChildProcess(const std::vector<std::string>& argv) {
  std::vector<char*> arguments;
  for (const std::string& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  std::vector<char*> environment;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (!std::string_view(*variable).starts_with("TESSERA_")) environment.push_back(*variable);
  }
  std::string no_cache = "TESSERA_CACHE_DIR=off";  // what one test keeps is no other's
  environment.push_back(no_cache.data());
  environment.push_back(nullptr);

  const std::string out = directory_.File("out");
  const std::string err = directory_.File("err");
  posix_spawn_file_actions_t actions;
  EXPECT_EQ(::posix_spawn_file_actions_init(&actions), 0);
  EXPECT_EQ(::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0), 0);
  EXPECT_EQ(::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.c_str(), O_WRONLY | O_CREAT, 0600), 0);
  EXPECT_EQ(::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err.c_str(), O_WRONLY | O_CREAT, 0600), 0);
  const int error = ::posix_spawn(&pid_, argv[0].c_str(), &actions, nullptr, arguments.data(), environment.data());
  EXPECT_EQ(error, 0) << argv[0] << ": " << std::strerror(error);
  if (error != 0) pid_ = -1;
  EXPECT_EQ(::posix_spawn_file_actions_destroy(&actions), 0);
}

ChildProcess::~ChildProcess() {
  if (pid_ <= 0 || result_.has_value()) return;
  Signal(SIGKILL);
  EXPECT_TRUE(Wait().has_value());
}

void ChildProcess::Signal(int number) const {
  // A pid of -1 would name every process.
  ASSERT_TRUE(pid_ > 0 && !result_.has_value());
  EXPECT_EQ(::kill(pid_, number), 0);
}

std::optional<int> ChildProcess::Wait(std::chrono::milliseconds timeout) {
  if (pid_ <= 0) return std::nullopt;
  Eventually(timeout, [this] {
    int status = 0;
    if (!result_.has_value() && ::waitpid(pid_, &status, WNOHANG) == pid_) {
      result_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }
    return result_.has_value();
  });
  return result_;
}

std::string ChildProcess::ReadAll(const char* name) const {
  std::ostringstream text;
  text << std::ifstream(directory_.File(name)).rdbuf();
  return text.str();
}

Finished RunProgram(const std::vector<std::string>& argv) {
  ChildProcess child(argv);
  Finished finished{.code = child.Wait(), .out = {}, .err = {}};
  finished.out = child.Out();
  finished.err = child.Err();
  return finished;
}

}  // namespace tessera::e2e
