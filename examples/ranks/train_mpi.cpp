// SPDX-License-Identifier: Apache-2.0
// Trains a layer of attention on the processes that mpirun starts, and on each of them alone, and compares the losses.
// layer.hpp is the part that matters.
#include <tessera/mpi.h>

#include <cstdio>
#include <exception>

#include "layer.hpp"

namespace {

tessera::Communicator over(MPI_Comm comm) {
  tessera_communicator* made = nullptr;
  if (tessera_mpi_communicator(comm, 60, &made) != TESSERA_OK) throw std::runtime_error(tessera_last_error());
  return tessera::Communicator(made);
}

int run() {
  const tessera::Communicator world = over(MPI_COMM_WORLD), alone = over(MPI_COMM_SELF);
  const auto sum = [](Numbers& numbers) {
    MPI_Allreduce(MPI_IN_PLACE, numbers.data(), int(numbers.size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  };
  const std::vector<double> one = train(
                                alone, [](Numbers&) {}, 40),
                            many = train(world, sum, 40);
  return world.rank() == 0 && !report(one, many, world.size());
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);  // so that a call of MPI that hangs can be left behind
  try {
    const int status = run();
    MPI_Finalize();
    return status;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);  // MPI_Finalize would wait for messages that never come
  }
}
