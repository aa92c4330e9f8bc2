package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	_ "github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	"tmc"
	tmcv1 "tmc/v1"
)

var errChanged = errors.New("the customer changed their mind")

// open returns a database by the name of its driver.
func open(driver, dsn string) (*sql.DB, tmc.Database) {
	db, err := sql.Open(driver, dsn)
	fail(err)
	db.SetMaxOpenConns(32)
	if driver == "pgx" {
		return db, tmc.PostgreSQL
	}
	return db, tmc.MySQL
}

func dial(addresses, app, key, checks string) *tmc.Client {
	client, err := tmc.Dial(tmc.Config{
		Addresses: strings.Split(addresses, ","), App: app, Key: key, CheckAddress: checks,
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	fail(err)
	return client
}

// sellAll has each order paid that is not in the database yet: every ninth is cancelled in its transaction. It answers checks.
func sellAll(addresses, key, driver, dsn, checks string, orders int) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	client, numbers, all := dial(addresses, "orders", key, checks), make(chan int), sync.WaitGroup{}
	db, database := open(driver, dsn)
	ledger, err := client.Ledger(ctx, db, database)
	fail(err)
	listener, err := net.Listen("tcp", checks)
	fail(err)
	all.Go(func() { fail(ledger.Checks().Serve(ctx, listener)) })
	sellers := sync.WaitGroup{}
	for range 8 {
		sellers.Go(func() {
			for number := range numbers {
				sell(ctx, ledger, database, number)
			}
		})
	}
	for number := range orders {
		numbers <- number
	}
	close(numbers)
	sellers.Wait()
	fmt.Println("all is sold")
	all.Wait()
	fail(client.Close())
}

// answer answers checks over gRPC and over HTTP, and sells nothing.
func answer(addresses, key, driver, dsn, overGRPC, overHTTP string) {
	client := dial(addresses, "orders", key, overGRPC)
	db, database := open(driver, dsn)
	ledger, err := client.Ledger(context.Background(), db, database)
	fail(err)
	checks := ledger.Checks()
	listener, err := net.Listen("tcp", overGRPC)
	fail(err)
	go func() { fail(http.ListenAndServe(overHTTP, checks)) }()
	fmt.Println("answers")
	fail(checks.Serve(context.Background(), listener))
}

// describe prints the protos that the stubs were made from, as FileDescriptorSet.
func describe() {
	files := &descriptorpb.FileDescriptorSet{}
	for _, file := range []protoreflect.FileDescriptor{
		tmcv1.File_tmc_v1_types_proto, tmcv1.File_tmc_v1_message_proto, tmcv1.File_tmc_v1_consumption_proto, tmcv1.File_tmc_v1_check_proto,
	} {
		files.File = append(files.File, protodesc.ToFileDescriptorProto(file))
	}
	encoded, err := proto.Marshal(files)
	fail(err)
	_, err = os.Stdout.Write(encoded)
	fail(err)
}

func sell(ctx context.Context, ledger *tmc.Ledger, database tmc.Database, number int) {
	text := fmt.Sprint(number)
	for ctx.Err() == nil {
		err := ledger.Transact(ctx, func(tx *tmc.Tx) error {
			known := 0
			query := "SELECT COUNT(*) FROM orders WHERE name = '" + text + "'"
			if err := tx.QueryRowContext(ctx, query).Scan(&known); err != nil || known > 0 {
				return err
			}
			if _, err := tx.ExecContext(ctx, "INSERT INTO orders VALUES ('"+text+"')"); err != nil {
				return err
			}
			tx.Send(tmc.Message{Topic: "order.paid", Key: text, Body: []byte(text), ContentType: "text/plain"})
			if number%9 == 0 {
				return errChanged
			}
			return nil
		})
		if err == nil || errors.Is(err, errChanged) {
			return
		}
		slog.Info("sold again", "order", number, "error", err)
		time.Sleep(10 * time.Millisecond)
	}
}

// countAll writes a row for each message, until SIGTERM.
func countAll(addresses, app, key, driver, dsn, user, password string) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	client := dial(addresses, app, key, "")
	db, database := open(driver, dsn)
	inbox, err := tmc.NewInbox(ctx, db, database)
	fail(err)
	began := time.Now()
	fmt.Println("counts")
	err = client.Consume(ctx, tmc.Consumer{
		BrokerUser: user, BrokerPassword: password, Grace: 500 * time.Millisecond,
		Handlers: map[string]tmc.Handler{
			"order.paid": inbox.Once(func(ctx context.Context, tx *sql.Tx, m *tmc.Copy) error {
				switch {
				case m.Key == "reject":
					return tmc.Reject(errors.New("no stock"))
				case m.Key == "slow":
					fmt.Println("slow began")
					<-ctx.Done()
					return errors.New("its time was over")
				case m.Key == "panic":
					panic("no stock")
				case m.Key == "later" && time.Since(began) < time.Second:
					return tmc.Later(100 * time.Millisecond)
				}
				_, err := tx.ExecContext(ctx, "INSERT INTO coupons VALUES ('"+string(m.Body)+"')")
				return err
			}),
		},
	})
	if ctx.Err() == nil {
		fail(err)
	}
	fail(client.Close())
}
